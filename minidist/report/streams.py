"""The streams of one rank: computing, sending, receiving, and its host and the link to it where there is one.

Two bars above each other overlap in time; what no computing hides is named in the title. The picture is called "lanes"
on the command line.

Proved by: tests/report/test_pictures.py
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.core.base.errors import UsageError
from minidist.report.frame import Figure, Style, byte_text, finish, name_rows, new_panel, patch, time_unit, visible
from minidist.report.palette import MESSAGES, NAMES, PALETTE, distinct, ink, kind_of
from minidist.report.space_time import earliest
from minidist.report.timeline import merged, pairs, without

# A bar: 1 send or 2 receive, start, partner there, end, and the message. BROAD: the height of a bar.
Bar = tuple[int, float, float, float, MessageEvent]
BROAD = 0.6
PLACES = {"host step": "host computes"}  # spans of `parallel.host_pool.HostPool` -> their row; all others compute
LINK = ("to host", "to device")  # spans of the same, one stream each


def streams(
    traces: Sequence[Trace], *, rank: int = 0, title: str = "", command: str = "", most_seconds: float = 0
) -> Figure:
    """Draw compute, send and receive of `rank`, and, when it offloads, its host and both directions of the link to it.

    A row for which the rank has nothing is left out, except compute. A message's bar is red until its partner has come.
    Messages of several purposes have several shades, and those of streams that run at the same time lie in bands.
    most_seconds: what the axis has room for at least, so that several pictures can have one scale.
    """
    # What this rank computed, sent, received and moved to or from its host, each in another row.
    if not 0 <= rank < len(traces):
        raise UsageError(f"the run has no rank {rank}; its ranks are 0..{len(traces) - 1}")
    spans = traces[rank].spans
    computing, crossing = _by_place(spans)
    bars = _bars(traces, rank)
    rows = _rows(bool(bars), bool(crossing), {span.name for span in computing})
    begin = earliest(traces)  # of one step of many: not at zero
    longest = max([begin, *(s.end for s in (*computing, *crossing)), *(end for *_, end, _ in bars)]) - begin
    width = max(longest, most_seconds)
    factor, unit = time_unit(width)
    figure, axes = new_panel(9, 1.4 + 0.5 * len(rows))
    axes.barh(range(len(rows)), [longest * factor] * len(rows), height=BROAD, color=PALETTE["idle"], zorder=0)
    used: dict[str, Any] = {}
    drawn: dict[str, float] = defaultdict(float)  # seconds of each kind
    colours = {**PALETTE, **_shades(bars)}

    def bar(y: float, start: float, end: float, kind: str, gid: str, text: str, broad: float = BROAD) -> None:
        if end <= start:
            return
        colour = colours[kind]
        style: Style = {"height": broad, "color": colour, "edgecolor": "white", "linewidth": 0.6, "gid": gid}
        axes.barh(y, (end - start) * factor, left=(start - begin) * factor, **style)
        if end - start > 0.012 * len(text) * width:
            middle = ((start + end) / 2 - begin) * factor
            axes.text(middle, y, text, ha="center", va="center", fontsize=7, color=ink(colour))
        used.setdefault(kind, patch(colour, NAMES.get(kind, kind)))
        drawn[kind] += end - start

    # Row 0 is what the rank itself computes. A message is red until its partner has come.
    for span in computing:
        bar(
            rows.index(PLACES.get(span.name, "compute")), span.start, span.end, kind_of(span.name), "compute", span.name
        )
    bands, broad = _bands(bars)
    for row, start, met, end, message in bars:
        y, text = row + bands[message.lane], byte_text(message.nbytes) * (broad > BROAD / 3)
        kind = message.purpose if message.purpose in colours else "communication"
        bar(y, start, met, "blocked", "blocked", "", broad)
        bar(y, met, end, kind, message.kind, text, broad)
    for span in crossing:
        bar(rows.index(span.name), span.start, span.end, "communication", span.name, "")

    used["idle"] = patch(PALETTE["idle"], NAMES["idle"])
    name_rows(axes, rows)
    axes.set(xlim=(0, width * factor or 1), xlabel=f"time [{unit}]")

    # The title names what overlapping would still have to hide.
    bare = exposed(traces, rank)
    hidden = f"{bare * factor:.4g} {unit} of {longest * factor:.4g} {unit} are communication that no computing hides"
    return finish(figure, visible(used, drawn, width), command, title or f"rank {rank}: {hidden}")


def _by_place(spans: Sequence[SpanEvent]) -> tuple[list[SpanEvent], list[SpanEvent]]:
    """Return the spans that compute, and those that cross the link to the host: of HostPool, or of its two names."""
    crossing = [span for span in spans if span.category == "offload" or span.name in LINK]
    return [span for span in spans if span.category == "compute" and span.name not in LINK], crossing


def _rows(messages: bool, crossing: bool, computed: set[str]) -> list[str]:
    """Return the names of the rows; send and receive are empty rows of a rank that communicates with nobody at all."""
    host = [place for name, place in PLACES.items() if name in computed]
    if not crossing:
        return ["compute", "send", "receive", *host]
    return ["compute", *(("send", "receive") if messages else ()), *host, *LINK]


def _shades(bars: Sequence[Bar]) -> dict[str, str]:
    """Return a shade of the colour of communication for each purpose, or {} where there is one purpose only."""
    purposes = list(dict.fromkeys(message.purpose for *_, message in bars))
    return dict(zip(purposes, distinct(MESSAGES, len(purposes)), strict=True)) if len(purposes) > 1 else {}


def _bands(bars: Sequence[Bar]) -> tuple[dict[str, float], float]:
    """Return where in a row the messages of each stream lie, below its middle, and the height of their bars.

    Where no messages of two streams overlap in time, all lie in the middle.
    """
    lanes = list(dict.fromkeys(message.lane for *_, message in bars))
    busy = [
        merged([(start, end) for _, start, _, end, message in bars if message.lane == lane and end > start])
        for lane in lanes
    ]
    alone = sum(end - start for start, end in merged([span for spans in busy for span in spans]))
    overlap = sum(end - start for spans in busy for start, end in spans) > alone * (1 + 1e-9)
    if not overlap:
        return dict.fromkeys(lanes, 0.0), BROAD
    return {lane: BROAD * ((place + 0.5) / len(lanes) - 0.5) for place, lane in enumerate(lanes)}, BROAD / len(lanes)


def exposed(traces: Sequence[Trace], rank: int) -> float:
    """Return the seconds in which the rank communicates, or waits for a message, and computes nothing."""
    # Communication is the union of all messages and transfers; what is left of it outside all computing is exposed.
    computing, crossing = ([(span.start, span.end) for span in of] for of in _by_place(traces[rank].spans))
    communicating = merged([*((start, end) for _, start, _, end, *_ in _bars(traces, rank)), *crossing])
    return sum(end - start for start, end in without(communicating, computing))


def _bars(traces: Sequence[Trace], rank: int) -> list[Bar]:
    """Return the bars of each complete message of `rank`."""
    bars = []
    for send, receive in pairs(traces):
        if send.rank == rank and send.end >= 0:
            # The send: from the post until it is complete.
            start = max(send.start, send.posted)
            end, met = send.end, start
            if receive is not None and receive.end >= 0:
                end = min(end, receive.end)  # the wait for a send may come long after it was taken
                if start < receive.posted >= receive.end:
                    met = end  # it lay there until its receiver came
            bars.append((1, start, met, end, send))
        if receive is not None and receive.rank == rank and receive.end >= 0:
            # The receive: its partner is there when the message departs.
            met = min(max(receive.start, send.start), receive.end)
            bars.append((2, receive.start, met, receive.end, receive))
    return bars
