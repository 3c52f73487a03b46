"""The Gantt of a run: one row per rank, what it computed, where it waited, and the idle share in the title.

The Gantt of a *plan* (`gantt`) is what should happen; this one is what happened according to the trace.

Proved by: tests/report/test_pictures.py
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidist.base.traces import SpanEvent, Trace
from minidist.report.frame import Figure, Style, finish, name_rows, new_panel, patch, time_unit, visible
from minidist.report.palette import NAMES, PALETTE, ink, kind_of, shade
from minidist.report.timeline import Interval, compute_of, merged, pairs, waits, without

MAX_RANKS, MAX_BARS = 32, 3000


def run_gantt(traces: Sequence[Trace], *, title: str = "", command: str = "") -> Figure:
    """Draw one row per rank (the first 32), rank 0 on top; a bar of a pipeline's action has its micro-batch number.

    Red is the time in which the main stream computes nothing and any stream of the rank waits for a partner.
    """
    shown = traces[:MAX_RANKS]
    rows = {trace.rank: compute_of(trace.spans, "main") for trace in shown}
    begin, end = _extent(traces, rows)
    longest = end - begin
    factor, unit = time_unit(longest)
    figure, axes = new_panel(11, 1.5 + 0.32 * len(shown))
    bars = _Bars(axes, begin, end, factor, sum(map(len, rows.values())) <= MAX_BARS)

    # Per rank: grey is the whole run, red where it waited for a partner that had not come, and what it computed on top.
    waiting = waits(pairs(traces), end)
    busy = 0.0
    for rank, spans in rows.items():
        axes.barh(rank, longest * factor, height=0.86, color=PALETTE["idle"], zorder=0)
        computing = [(span.start, span.end) for span in spans]
        busy += sum(stop - start for start, stop in merged(computing))
        # Waiting while the stream computes costs nothing, so only the rest is red.
        for start, stop in without(_blocked(waiting, rank), computing):
            if stop > begin:
                bars.add(rank, max(start, begin), min(stop, end), "blocked", "blocked")
        bars.add_computing(rank, spans)
    for (rank, kind, gid, chunk), intervals in bars.many.items():
        axes.broken_barh(intervals, (rank - 0.43, 0.86), color=shade(PALETTE[kind], chunk), linewidth=0, gid=gid)
    bars.used["idle"] = patch(PALETTE["idle"], "a message on its way, or nothing to do")
    bars.drawn["idle"] = longest * len(shown) - busy - bars.drawn["blocked"]
    name_rows(axes, [f"rank {trace.rank}" for trace in shown], fontsize=10 if len(shown) <= 8 else 7)
    axes.set(xlim=(0, longest * factor or 1), xlabel=f"time [{unit}]")

    # The idle share counts all that is not computing, whether it waits or has nothing to do.
    idle = 1 - busy / (longest * len(shown)) if longest else 0.0
    more = f", the first {MAX_RANKS} of {len(traces)} ranks" if len(traces) > MAX_RANKS else ""
    said = f"computing and waiting: {100 * idle:.1f} % of the ranks' time computes nothing{more}"
    return finish(figure, visible(bars.used, bars.drawn, longest), command, title or said)


def _blocked(waiting: Mapping[tuple[int, str], tuple[list[Interval], list[Interval]]], rank: int) -> list[Interval]:
    """Return when any stream of the rank waits for a partner."""
    return merged([wait for (owner, _), (blocked, _) in waiting.items() if owner == rank for wait in blocked])


def _extent(traces: Sequence[Trace], rows: dict[int, list[SpanEvent]]) -> tuple[float, float]:
    """Return when the first of the spans and messages begins, and when the last one ends."""
    times = [(span.start, span.end) for spans in rows.values() for span in spans]
    messages = [message for trace in traces for message in trace.messages]
    times += [(message.posted, message.end) for message in messages if message.end >= message.posted]
    return min((start for start, _ in times), default=0.0), max((end for _, end in times), default=0.0)


@dataclass
class _Bars:
    """The bars of a picture from `begin` to `end`, `factor` units of its axis per second.

    few: each bar is an artist. Many are one collection per rank and kind, because an artist for each would take
    minutes.
    """

    axes: Any
    begin: float
    end: float
    factor: float
    few: bool
    used: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of each kind
    many: dict[tuple[int, str, str, int], list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, rank: int, start: float, stop: float, kind: str, gid: str, chunk: int = 0) -> None:
        """Draw a bar, or keep it for its collection."""
        self.used.setdefault(kind, patch(PALETTE[kind], NAMES[kind]))
        self.drawn[kind] += stop - start
        left, width = (start - self.begin) * self.factor, (stop - start) * self.factor
        if self.few:
            style: Style = {"color": shade(PALETTE[kind], chunk), "gid": gid, "edgecolor": "white", "linewidth": 0.3}
            self.axes.barh(rank, width, left=left, height=0.86, **style)
        else:
            self.many.setdefault((rank, kind, gid, chunk), []).append((left, width))

    def add_computing(self, rank: int, spans: Sequence[SpanEvent]) -> None:
        """Draw what a rank computed; a rank with several stages of a pipeline has a shade for each."""
        stages = sorted({_stage(span.name) for span in spans})
        for span in spans:
            chunk = stages.index(_stage(span.name))
            self.add(rank, span.start, span.end, kind_of(span.name), "compute", chunk)
            # An action of a pipeline: its micro-batch's number, where the bar is wide enough.
            label = span.name.lstrip("0123456789")[1:]
            least = 0.006 * len(label) * (self.end - self.begin)
            if self.few and label.isdigit() and span.end - span.start > least:
                style: Style = {"ha": "center", "va": "center", "fontsize": 6.5}
                colour = ink(shade(PALETTE[kind_of(span.name)], chunk))
                middle = ((span.start + span.end) / 2 - self.begin) * self.factor
                self.axes.text(middle, rank, label, color=colour, **style)


def _stage(name: str) -> str:
    """Return the number of the stage that a pipeline's action begins with: "2" of 2F3; "" of any other span."""
    return name[: len(name) - len(name.lstrip("0123456789"))]
