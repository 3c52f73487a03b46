"""The space-time diagram: a rank is a horizontal line, time runs to the right, a message is an arrow from line to line.

It shows what a log does not: which rank waits for which. Red is a rank whose partner has not come yet. After a deadlock
the red runs to the edge, each line says what its rank waits for, and the wait-for cycle is drawn at the right edge.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm.waiting import Waiting, circle_text, find_cycle
from minidist.report.frame import Figure, Style, byte_text, finish, line, new_figure, patch, tidy, time_unit
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
MAX_BESIDE = 60  # of collective calls outside the main stream: with more messages a call is one band


def space_time(traces: Sequence[Trace], *, title: str = "", command: str = "") -> Figure:
    """Draw one line per stream of each rank, rank 0 on top, and one arrow per delivered message.

    Of many buckets that travel outside the main streams, each is one band on its line instead of its arrows.
    """
    # [1] The lines, and the axis of time. After a deadlock there is room at the right edge for what each rank waits
    # for.
    messages = pairs(traces)
    rows = rows_of(traces)
    stuck = [event for trace in traces for event in unanswered(trace.messages)]
    longest = latest(traces)
    right = longest * (1.3 if stuck else 1) or 1e-6
    begin = _begin(traces)  # of one step of many: not at zero
    factor, unit = time_unit(right)
    figure = new_figure(9, 1.5 + 0.55 * len(rows))
    axes = figure.add_subplot()
    used: dict[str, Any] = {}

    # [2] What each stream computes, then where it waits (red) or transfers.
    for (rank, lane), y in rows.items():
        axes.plot([begin * factor, right * factor], [y, y], color="#999999", linewidth=0.8, zorder=1)
        for name, interval in _joined(compute_of(traces[rank].spans, lane)):
            kind = kind_of(name)
            _bar(axes, interval, y, factor, PALETTE[kind], "compute")
            used.setdefault(kind, patch(PALETTE[kind], NAMES[kind]))
    buckets, messages_of_their_own = _folded(messages, right - begin)
    width = (right - begin) * factor
    drawn = bands(buckets)
    late: dict[tuple[int, str], list[Interval]] = {}
    for key, (late[key], transfers) in _waits_beside_computing(traces, messages, drawn, right, width / factor).items():
        for interval in transfers:
            _bar(axes, interval, rows[key], factor, PALETTE["communication"] + "55", "transfer")
            used.setdefault("transfer", patch(PALETTE["communication"] + "55", "waits for bytes on their way"))
        for interval in late[key]:
            _bar(axes, interval, rows[key], factor, PALETTE["blocked"], "blocked")
            used.setdefault("blocked", patch(PALETTE["blocked"], NAMES["blocked"]))
    _bands(axes, drawn, late, rows, factor, width, used)

    # [3] After a deadlock: what each rank waits for, to the edge of the picture.
    for event in stuck:
        _stuck(axes, event, rows[event.rank, event.lane], right, factor)
        used.setdefault("blocked", patch(PALETTE["blocked"], NAMES["blocked"]))

    # [4] The messages, and the circle of waits.
    _arrows(axes, messages_of_their_own, rows, factor, begin * factor, width, bool(drawn), used)
    circle = _wait_for(axes, stuck, rows, right * factor, used)

    axes.set_yticks(list(rows.values()), [row_label(rank, lane) for rank, lane in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(begin * factor, (begin + (right - begin) * (1.12 if stuck else 1.01)) * factor)
    axes.set_xlabel(f"time [{unit}]")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    tidy(axes)
    delivered = sum(arrived(pair) for pair in messages)
    axes.set_title(title or _title(delivered, longest - begin, stuck, circle), fontsize=10, loc="left")
    return finish(figure, used.values(), command)


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


def _begin(traces: Sequence[Trace]) -> float:
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


def _bar(axes: Any, interval: Interval, y: int, factor: float, colour: str, gid: str) -> None:
    from matplotlib.patches import Rectangle

    corner, width = (interval[0] * factor, y - BAR / 2), (interval[1] - interval[0]) * factor
    axes.add_patch(Rectangle(corner, width, BAR, color=colour, linewidth=0, gid=gid, zorder=2))


def _folded(messages: Sequence[Pair], width: float) -> tuple[list[Pair], list[Pair]]:
    """Return the delivered messages that are drawn as bands, and those that are arrows. width: the picture's, in s."""
    delivered = [pair for pair in messages if arrived(pair)]
    beside = [pair for pair in delivered if pair.send.lane != "main" and pair.send.operation != "message"]
    # A call's messages leave a line one after the other, and arrows nearer than APART cover each other.
    calls = bands(beside)
    apart = sum(call.end - call.start for call in calls) / max(1, len(beside))
    if len(beside) <= MAX_BESIDE and apart >= APART * width:
        return [], delivered
    return beside, [pair for pair in delivered if pair.send.lane == "main" or pair.send.operation == "message"]


def _stuck(axes: Any, event: MessageEvent, y: int, right: float, factor: float) -> None:
    """Draw a wait that never ends, and write what the stream waits for."""
    if event.kind == "receive":  # a send without a partner is among the pairs
        _bar(axes, (event.start, right), y, factor, PALETTE["blocked"], "blocked")
    style: Style = {"ha": "right", "va": "bottom", "fontsize": 8, "color": PALETTE["blocked"]}
    axes.text(right * factor, y - 0.24, operation_text(event), **style)


def _waits_beside_computing(
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


def _bands(
    axes: Any,
    drawn: Sequence[Band],
    late: dict[tuple[int, str], list[Interval]],
    rows: Rows,
    factor: float,
    width: float,
    used: dict[str, Any],
) -> None:
    """Draw a bar for each collective call on each line, under the waits in it, with the bytes that the line sent.

    late: the waits that are drawn. width: of the picture, in units of its axis.
    """
    from matplotlib.patches import Rectangle

    colour = PALETTE["communication"]
    for band in drawn:
        y, whole = rows[band.rank, band.lane], (band.start, band.end)
        corner, long = (band.start * factor, y - BAR / 2), (band.end - band.start) * factor
        # White between neighbours, which would hide a narrow band.
        edge = 0.6 if long > HAIR / 4 * width else 0
        style: Style = {"facecolor": colour, "edgecolor": "white", "linewidth": edge, "gid": "band", "zorder": 1.5}
        axes.add_patch(Rectangle(corner, long, BAR, **style))
        # The bytes, where nothing else is.
        start, end = max(
            without([whole], late.get((band.rank, band.lane), ())), key=lambda part: part[1] - part[0], default=whole
        )
        if (end - start) * factor > 0.75 * LABEL * width:
            text: Style = {"fontsize": 6.5, "ha": "center", "va": "center", "color": "white"}
            axes.text((start + end) / 2 * factor, y, byte_text(band.nbytes), **text, zorder=4)
        used.setdefault("band", patch(colour, "all messages of one bucket"))


def _arrows(
    axes: Any,
    delivered: list[Pair],
    rows: Rows,
    factor: float,
    begin: float,
    width: float,
    has_bands: bool,
    used: dict[str, Any],
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    # From the departure on the sender's line to the arrival on the receiver's.
    colour = PALETTE["communication"]
    ends = []
    for send, receive in delivered:
        assert receive is not None
        tail = (send.start if send.start >= 0 else send.posted) * factor, rows[send.rank, send.lane]
        ends.append((tail, (receive.end * factor, rows[receive.rank, receive.lane])))

    # Many messages: thin lines in one collection, because an arrow for each would take long to draw.
    if ends:
        style: Style = {"marker": ">", "markevery": [1], "markersize": 5}
        used.setdefault("message", line(colour, "message, from its departure to its arrival", **style))
    if len(ends) > MAX_ARROWS:
        axes.add_collection(LineCollection(ends, colors=colour, linewidths=0.3, gid="messages", zorder=3))
        return

    # Beside buckets there are too many messages for the bytes of each. labels: the places that are taken.
    labelled = len(ends) <= MAX_LABELS and not has_bands
    labels: list[tuple[float, float]] = []
    arrow: Style = {"arrowstyle": "-|>,head_length=3.5,head_width=1.8", "shrinkA": 0, "shrinkB": 0}
    for (tail, head), (send, _) in zip(ends, delivered, strict=True):
        axes.add_patch(FancyArrowPatch(tail, head, **arrow, color=colour, linewidth=1.0, gid="message", zorder=3))
        if labelled:
            near = 0.33 / max(abs(head[1] - tail[1]), 1)  # a third of a line away from the sender
            x, y = ((1 - near) * a + near * b for a, b in zip(tail, head, strict=True))
            x = max(x, begin + LABEL * width / 2)  # next to the names of the lines, not on them
            if any(abs(x - other[0]) < LABEL * width and abs(y - other[1]) < 0.2 for other in labels):
                continue  # two numbers on each other are none
            labels.append((x, y))
            box: Style = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            text: Style = {"fontsize": 6.5, "ha": "center", "va": "center", "color": colour, "bbox": box}
            axes.text(x, y, byte_text(send.nbytes), **text, zorder=4)


def _wait_for(axes: Any, stuck: list[MessageEvent], rows: Rows, edge: float, used: dict[str, Any]) -> list[int]:
    """Draw an arrow from each waiting rank to the one that it waits for, thick in the circle; return the circle."""
    from matplotlib.patches import FancyArrowPatch

    # The circle, as the deadlock report finds it; a receive from any rank is not in one.
    waiting = [
        Waiting(event.rank, event.lane, (event.peer,), operation_text(event)) for event in stuck if event.peer >= 0
    ]
    circle = find_cycle(waiting)
    steps = set(zip(circle, [*circle[1:], *circle[:1]], strict=True))
    for event in stuck:
        if event.peer < 0:
            continue
        inside = (event.rank, event.peer) in steps
        style: Style = {
            "color": PALETTE["blocked"],
            "linewidth": 2.2 if inside else 0.9,
            "linestyle": "-" if inside else "--",
        }

        # Beside the right edge, from the waiting stream's line to the main line of the rank that it waits for.
        tail, head = (edge, rows[event.rank, event.lane] + 0.12), (edge, rows[event.peer, "main"] - 0.12)
        shape: Style = {
            "arrowstyle": "-|>,head_length=6,head_width=3",
            "connectionstyle": f"arc3,rad={-0.4 if head[1] > tail[1] else 0.4}",
        }
        gid = "circle" if inside else "wait"
        axes.add_patch(FancyArrowPatch(tail, head, **shape, **style, gid=gid, clip_on=False, zorder=5))
        label = "wait-for circle" if inside else "waits for"
        used.setdefault(label, line(label=label, colour=style.pop("color"), **style))
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
