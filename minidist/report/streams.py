"""The streams of one rank: computing, sending, receiving, and the link to the host where there is one.

Two bars above each other overlap in time; what no computing hides is named in the title. The picture is called "lanes"
on the command line.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.traces import Trace
from minidist.core.base.errors import UsageError
from minidist.report.frame import Figure, Style, byte_text, finish, name_rows, new_panel, patch, time_unit
from minidist.report.palette import NAMES, PALETTE, kind_of
from minidist.report.space_time import earliest
from minidist.report.timeline import merged, pairs, without

LINK = ("to host", "to device")  # spans of `parallel.host_pool.HostPool`, one stream each


def streams(traces: Sequence[Trace], *, rank: int = 0, title: str = "", command: str = "") -> Figure:
    """Draw compute, send and receive of `rank`, and both directions of its link to the host when it offloads.

    A row for which the rank has nothing is left out, except compute. A message's bar is red until its partner has come.
    """
    # What this rank computed, sent, received and moved to or from its host, each in another row.
    if not 0 <= rank < len(traces):
        raise UsageError(f"the run has no rank {rank}; its ranks are 0..{len(traces) - 1}")
    trace = traces[rank]
    computing = [span for span in trace.spans if span.category == "compute"]
    crossing = [span for span in trace.spans if span.category == "offload"]
    bars = _bars(traces, rank)
    rows = _rows(bool(bars), bool(crossing))
    begin = earliest(traces)  # of one step of many: not at zero
    ends = [*(s.end for s in (*computing, *crossing)), *(end for *_, end, _ in bars)]
    longest = max([begin, *ends]) - begin
    factor, unit = time_unit(longest)
    figure, axes = new_panel(9, 1.4 + 0.5 * len(rows))
    axes.barh(range(len(rows)), [longest * factor] * len(rows), height=0.6, color=PALETTE["idle"], zorder=0)
    used: dict[str, Any] = {}

    def bar(y: int, start: float, end: float, kind: str, gid: str, text: str) -> None:
        if end <= start:
            return
        style: Style = {"height": 0.6, "color": PALETTE[kind], "edgecolor": "white", "linewidth": 0.6, "gid": gid}
        axes.barh(y, (end - start) * factor, left=(start - begin) * factor, **style)
        if end - start > 0.012 * len(text) * longest:
            middle = ((start + end) / 2 - begin) * factor
            axes.text(middle, y, text, ha="center", va="center", fontsize=7, color="white")
        used.setdefault(kind, patch(PALETTE[kind], NAMES[kind]))

    # Row 0 is computing; a message is red until its partner has come, then in the colour of communication.
    for span in computing:
        bar(0, span.start, span.end, kind_of(span.name), "compute", span.name)
    for y, start, met, end, nbytes in bars:
        bar(y, start, met, "blocked", "blocked", "")
        bar(y, met, end, "communication", "send" if y == 1 else "receive", byte_text(nbytes))
    for span in crossing:
        bar(rows.index(span.name), span.start, span.end, "communication", span.name, "")

    used["idle"] = patch(PALETTE["idle"], NAMES["idle"])
    name_rows(axes, rows)
    axes.set(xlim=(0, longest * factor or 1), xlabel=f"time [{unit}]")

    # The title names what overlapping would still have to hide.
    bare = exposed(traces, rank)
    hidden = f"{bare * factor:.4g} {unit} of {longest * factor:.4g} {unit} are communication that no computing hides"
    return finish(figure, used.values(), command, title or f"rank {rank}: {hidden}")


def _rows(messages: bool, crossing: bool) -> list[str]:
    """Return the names of the rows; send and receive are empty rows of a rank that communicates with nobody at all."""
    if not crossing:
        return ["compute", "send", "receive"]
    return ["compute", *(("send", "receive") if messages else ()), *LINK]


def exposed(traces: Sequence[Trace], rank: int) -> float:
    """Return the seconds in which the rank communicates, or waits for a message, and computes nothing."""
    # Communication is the union of all messages and transfers; what is left of it outside all computing is exposed.
    spans = traces[rank].spans
    computing = [(span.start, span.end) for span in spans if span.category == "compute"]
    crossing = [(span.start, span.end) for span in spans if span.category == "offload"]
    communicating = merged([*((start, end) for _, start, _, end, _ in _bars(traces, rank)), *crossing])
    return sum(end - start for start, end in without(communicating, computing))


def _bars(traces: Sequence[Trace], rank: int) -> list[tuple[int, float, float, float, int]]:
    """Return (1 for send or 2 for receive, start, partner there, end, bytes) of each complete message of `rank`."""
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
            bars.append((1, start, met, end, send.nbytes))
        if receive is not None and receive.rank == rank and receive.end >= 0:
            # The receive: its partner is there when the message departs.
            met = min(max(receive.start, send.start), receive.end)
            bars.append((2, receive.start, met, receive.end, receive.nbytes))
    return bars
