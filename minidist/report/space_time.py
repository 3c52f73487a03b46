"""The space-time diagram: a rank is a horizontal line, time runs to the right, a message is an arrow from line to line.

It shows what a log does not: which rank waits for which. Red is a rank whose partner has not come yet. After a deadlock
the red runs to the edge, each line says what its rank waits for, and the wait-for cycle is drawn at the right edge.

Proved by: tests/report/test_pictures.py
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm.waiting import Waiting, circle_text, find_cycle
from minidist.report.frame import (
    Figure,
    Style,
    byte_text,
    finish,
    line,
    name_rows,
    new_panel,
    patch,
    time_unit,
    visible,
)
from minidist.report.palette import NAMES, PALETTE, kind_of
from minidist.report.timeline import (
    Band,
    Interval,
    Pair,
    arrived,
    bands,
    compute_of,
    pairs,
    row_label,
    unanswered,
    waits,
    without,
)

Rows = dict[tuple[int, str], int]  # (rank, stream) -> line
MAX_LABELS = 24  # with more messages the byte counts would cover each other
BAR = 0.34  # the height of a bar, as a part of the distance between two lines
HAIR = 0.02  # the width of the shortest wait that is drawn on a band, as a part of the picture's
LABEL = 0.06  # the width of a label, as a part of the picture's
MAX_ARROWS = 1500  # with more, lines without heads
APART = 0.02  # of two messages of a call, as a part of the picture's width: nearer, a call is one band
MAX_CALL_ARROWS = 60  # of collective calls outside the main stream: with more messages a call is one band


def space_time(
    traces: Sequence[Trace],
    *,
    title: str = "",
    command: str = "",
    most_seconds: float = 0,
    labels: Mapping[int, Sequence[str]] | None = None,
) -> Figure:
    """Draw one line per stream of each rank, rank 0 on top, and one arrow per delivered message.

    Of many buckets that travel outside the main streams, each is one band on its line instead of its arrows.
    most_seconds: what the axis has room for at least, so that several pictures can have one scale. labels: the texts of
    each rank's delivered messages, in the order in which it sent them; None: their bytes.
    """
    # [1] The lines, and the axis of time. After a deadlock there is room at the right edge for what each rank waits
    # for.
    messages = pairs(traces)
    rows = rows_of(traces)
    stuck = [event for trace in traces for event in unanswered(trace.messages)]
    longest = latest(traces)
    right = longest * (1.3 if stuck else 1) or 1e-6
    begin = earliest(traces)  # of one step of many: not at zero
    width = max(right - begin, most_seconds)
    factor, unit = time_unit(begin + width)
    figure, axes = new_panel(9, 1.5 + 0.55 * len(rows))
    drawing = _Drawing(axes, rows, factor, begin * factor, width * factor)

    # [2] What each stream computes, then where it waits (red) or transfers.
    for (rank, lane), y in rows.items():
        axes.plot([begin * factor, right * factor], [y, y], color="#999999", linewidth=0.8, zorder=1)
        for name, interval in _joined(compute_of(traces[rank].spans, lane)):
            drawing.bar(interval, y, kind_of(name), "compute")
    buckets, messages_of_their_own = _folded(messages, width)
    drawn = bands(buckets)
    late: dict[tuple[int, str], list[Interval]] = {}
    for key, (late[key], transfers) in _waits_during_computing(traces, messages, drawn, right, width).items():
        for interval in transfers:
            drawing.bar(interval, rows[key], "transfer", "transfer")
        for interval in late[key]:
            drawing.bar(interval, rows[key], "blocked", "blocked")
    drawing.bands(drawn, late)

    # [3] After a deadlock: what each rank waits for, to the edge of the picture.
    for event in stuck:
        drawing.stuck(event, right)

    # [4] The messages, and the circle of waits.
    drawing.arrows(messages_of_their_own, bool(drawn), labels)
    circle = drawing.wait_for(stuck, right * factor)

    name_rows(axes, [row_label(rank, lane) for rank, lane in rows], top=-0.6)
    end = (begin + width * (1.12 if stuck else 1.01)) * factor
    axes.set_xlim(begin * factor, end)
    _name_time(axes, longest, unit)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    delivered = sum(arrived(pair) for pair in messages)
    said = _title(delivered, longest - begin, stuck, circle)
    return finish(figure, visible(drawing.used, drawing.drawn, drawing.width), command, title or said)


def _name_time(axes: Any, longest: float, unit: str) -> None:
    """Name the axis of time, which has no numbers when no time has passed before a deadlock."""
    if longest:
        axes.set_xlabel(f"time [{unit}]")
    else:
        axes.set_xticks([])


def rows_of(traces: Sequence[Trace]) -> Rows:
    """Return {(rank, stream): line}, each rank's main stream first."""
    # A stream has a line when it sent, received or computed anything.
    rows: Rows = {}
    for trace in traces:
        lanes = dict.fromkeys(["main", *(m.lane for m in trace.messages), *(s.lane for s in trace.spans)])
        for lane in lanes:
            rows[trace.rank, lane] = len(rows)
    return rows


def latest(traces: Sequence[Trace]) -> float:
    """Return when the last thing that a trace knows of happened."""
    ends = [event.end for trace in traces for event in trace.messages]
    ends += [span.end for trace in traces for span in trace.spans]
    starts = [event.start for trace in traces for event in trace.messages]
    return max([0.0, *ends, *starts])


def earliest(traces: Sequence[Trace]) -> float:
    """Return when the first thing that is drawn begins."""
    posted = [event.posted for trace in traces for event in trace.messages]
    return max(0.0, min([span.start for trace in traces for span in trace.spans] + posted, default=0.0))


def _joined(spans: Sequence[SpanEvent]) -> list[tuple[str, Interval]]:
    """Return (name, interval) of each span; those of one name that touch are one, without a seam between them."""
    result: list[tuple[str, Interval]] = []
    for span in spans:
        if result and result[-1][0] == span.name and result[-1][1][1] == span.start:
            result[-1] = (span.name, (result[-1][1][0], span.end))
        else:
            result.append((span.name, (span.start, span.end)))
    return result


def _folded(messages: Sequence[Pair], width: float) -> tuple[list[Pair], list[Pair]]:
    """Return the delivered messages that are drawn as bands, and those that are arrows. width: the picture's, in s."""
    delivered = [pair for pair in messages if arrived(pair)]
    of_calls = [pair for pair in delivered if pair.send.lane != "main" and pair.send.operation != "message"]
    # A call's messages leave a line one after the other, and arrows nearer than APART cover each other.
    calls = bands(of_calls)
    apart = sum(call.end - call.start for call in calls) / max(1, len(of_calls))
    if len(of_calls) <= MAX_CALL_ARROWS and apart >= APART * width:
        return [], delivered
    return of_calls, [pair for pair in delivered if pair.send.lane == "main" or pair.send.operation == "message"]


def _waits_during_computing(
    traces: Sequence[Trace], messages: Sequence[Pair], drawn: Sequence[Band], right: float, width: float
) -> dict[tuple[int, str], tuple[list[Interval], list[Interval]]]:
    """Return each stream's waits for a partner and for bytes while it computed nothing, as far as the picture has room.

    drawn: the bands. width: of the picture, in seconds.
    """
    of_bands = {(band.rank, band.lane) for band in drawn}
    result = {}
    for (rank, lane), (blocked, transfer) in waits(messages, right).items():
        computing = [(span.start, span.end) for span in compute_of(traces[rank].spans, lane)]
        late = without(blocked, computing)
        if (rank, lane) in of_bands:
            # A bucket has a wait for each of its messages; those shorter than HAIR would only make it look striped.
            late, transfer = [(start, end) for start, end in late if end - start >= HAIR * width], []
        result[rank, lane] = late, without(transfer, computing)
    return result


@dataclass
class _Drawing:
    """The diagram. factor: units of its axis of time per second. begin, width: of the picture, in these units.

    used: the entries of the legend, in the order in which they are drawn first.
    """

    axes: Any
    rows: Rows
    factor: float
    begin: float
    width: float
    used: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # width of each kind's bars

    def bar(self, interval: Interval, y: int, kind: str, gid: str) -> None:
        """Draw a bar in the colour of its kind."""
        from matplotlib.patches import Rectangle

        corner, width = (interval[0] * self.factor, y - BAR / 2), (interval[1] - interval[0]) * self.factor
        self.axes.add_patch(Rectangle(corner, width, BAR, color=PALETTE[kind], linewidth=0, gid=gid, zorder=2))
        self.used.setdefault(kind, patch(PALETTE[kind], NAMES[kind]))
        self.drawn[kind] += width

    def stuck(self, event: MessageEvent, right: float) -> None:
        """Draw a wait that never ends, to the edge of the picture, and write what the stream waits for."""
        y = self.rows[event.rank, event.lane]
        if event.kind == "receive":  # a send without a partner is among the pairs
            self.bar((event.start, right), y, "blocked", "blocked")
        style: Style = {"ha": "right", "va": "bottom", "fontsize": 8, "color": PALETTE["blocked"]}
        self.axes.text(right * self.factor, y - 0.24, operation_text(event), **style)

    def bands(self, drawn: Sequence[Band], late: Mapping[tuple[int, str], list[Interval]]) -> None:
        """Draw a bar for each collective call on each line, under the waits in it, with the bytes that the line sent.

        late: the waits that are drawn.
        """
        from matplotlib.patches import Rectangle

        colour, factor = PALETTE["communication"], self.factor
        for band in drawn:
            y, whole = self.rows[band.rank, band.lane], (band.start, band.end)
            corner, long = (band.start * factor, y - BAR / 2), (band.end - band.start) * factor
            # White between neighbours, which would hide a narrow band.
            edge = 0.6 if long > HAIR / 4 * self.width else 0
            style: Style = {"facecolor": colour, "edgecolor": "white", "linewidth": edge, "gid": "band", "zorder": 1.5}
            self.axes.add_patch(Rectangle(corner, long, BAR, **style))
            # The bytes, where nothing else is.
            free = without([whole], late.get((band.rank, band.lane), ()))
            start, end = max(free, key=lambda part: part[1] - part[0], default=whole)
            if (end - start) * factor > 0.75 * LABEL * self.width:
                text: Style = {"fontsize": 6.5, "ha": "center", "va": "center", "color": "white"}
                self.axes.text((start + end) / 2 * factor, y, byte_text(band.nbytes), **text, zorder=4)
            self.used.setdefault("band", patch(colour, "all messages of one bucket"))

    def arrows(self, delivered: Sequence[Pair], has_bands: bool, texts: Mapping[int, Sequence[str]] | None) -> None:
        """Draw the messages, from the departure on the sender's line to the arrival on the receiver's."""
        from matplotlib.collections import LineCollection
        from matplotlib.patches import FancyArrowPatch

        colour, factor, rows = PALETTE["communication"], self.factor, self.rows
        ends = []
        for send, receive in delivered:
            assert receive is not None
            tail = (send.start if send.start >= 0 else send.posted) * factor, rows[send.rank, send.lane]
            ends.append((tail, (receive.end * factor, rows[receive.rank, receive.lane])))

        # Many messages: thin lines in one collection, because an arrow for each would take long to draw.
        if ends:
            style: Style = {"marker": ">", "markevery": [1], "markersize": 5}
            self.used.setdefault("message", line(colour, "message, from its departure to its arrival", **style))
        if len(ends) > MAX_ARROWS:
            self.axes.add_collection(LineCollection(ends, colors=colour, linewidths=0.3, gid="messages", zorder=3))
            return

        # Next to buckets there are too many messages for the bytes of each.
        labelled = len(ends) <= MAX_LABELS and not has_bands
        labels: list[tuple[float, float]] = []  # the places that are taken
        given = {rank: iter(of_rank) for rank, of_rank in (texts or {}).items()}
        arrow: Style = {"arrowstyle": "-|>,head_length=3.5,head_width=1.8", "shrinkA": 0, "shrinkB": 0}
        for (tail, head), (send, _) in zip(ends, delivered, strict=True):
            style = {"color": colour, "linewidth": 1.0, "gid": "message", "zorder": 3}
            self.axes.add_patch(FancyArrowPatch(tail, head, **arrow, **style))
            if labelled:
                text = next(given.get(send.rank, iter(())), byte_text(send.nbytes))
                self._label(text, tail, head, labels)

    def _label(
        self, text: str, tail: tuple[float, int], head: tuple[float, int], taken: list[tuple[float, float]]
    ) -> None:
        """Write on an arrow, unless there is a text already; taken: the places of those."""
        for part in (0.33, 0.67, 0.5):  # of a line away from the sender; two numbers on each other are none
            near = part / max(abs(head[1] - tail[1]), 1)
            x, y = ((1 - near) * a + near * b for a, b in zip(tail, head, strict=True))
            x = max(x, self.begin + LABEL * self.width / 2)  # next to the names of the lines, not on them
            if not any(abs(x - other[0]) < LABEL * self.width and abs(y - other[1]) < 0.2 for other in taken):
                break
        else:
            return
        taken.append((x, y))
        box: Style = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        style: Style = {"fontsize": 6.5, "ha": "center", "va": "center", "color": PALETTE["communication"]}
        self.axes.text(x, y, text, **style, bbox=box, zorder=4)

    def wait_for(self, stuck: Sequence[MessageEvent], edge: float) -> list[int]:
        """Draw an arrow from each waiting rank to the one that it waits for, thick in the circle; return the circle."""
        from matplotlib.patches import FancyArrowPatch

        # The circle, as the deadlock report finds it; a receive from any rank is not in one.
        waiting = [
            Waiting(event.rank, event.lane, (event.peer,), operation_text(event)) for event in stuck if event.peer >= 0
        ]
        circle = find_cycle(waiting)
        steps = set(zip(circle, [*circle[1:], *circle[:1]], strict=True))
        for event in stuck:
            # From any rank, or for a rank that is not drawn.
            if (event.peer, "main") not in self.rows:
                continue
            inside = (event.rank, event.peer) in steps
            style: Style = {"linewidth": 2.2, "linestyle": "-"} if inside else {"linewidth": 0.9, "linestyle": "--"}

            # At the right edge, from the waiting stream's line to the main line of the rank that it waits for.
            tail = edge, self.rows[event.rank, event.lane] + 0.12
            head = edge, self.rows[event.peer, "main"] - 0.12
            bow, colour = -0.4 if head[1] > tail[1] else 0.4, PALETTE["blocked"]
            if event.rank == event.peer:
                tail, head, bow = (edge, tail[1] - 0.4), (edge, head[1] + 0.4), -0.8  # a loop that can be seen
            shape: Style = {"arrowstyle": "-|>,head_length=6,head_width=3", "connectionstyle": f"arc3,rad={bow}"}
            gid, label = ("circle", "wait-for circle") if inside else ("wait", "waits for")
            arrow = FancyArrowPatch(tail, head, **shape, **style, color=colour, gid=gid, clip_on=False, zorder=5)
            self.axes.add_patch(arrow)
            self.used.setdefault(label, line(colour, label, **style))
        return circle


def operation_text(event: MessageEvent) -> str:
    """Return what a stream waits for, in words."""
    way = "to" if event.kind == "send" else "from"
    other = "any rank" if event.peer < 0 else f"rank {event.peer}"
    name = "" if event.operation == "message" else f"{event.operation}: "
    return f"{name}{event.kind} {way} {other}, tag {event.tag}, {byte_text(event.nbytes)}"


def _title(delivered: int, longest: float, stuck: list[MessageEvent], circle: list[int]) -> str:
    count = f"{delivered} message{'s' * (delivered != 1)}"
    if stuck:
        way = f": {circle_text(circle, ' → ', '')}" if circle else ""
        return f"deadlock{way}   (waiting ranks: {len({event.rank for event in stuck})}, {count} delivered)"
    factor, unit = time_unit(longest)
    return f"{count}, {longest * factor:.4g} {unit}"
