"""The memory of a rank over time, stacked by purpose, with the peak marked.

The peak is what decides whether a job fits; the stack at the peak says which technique would lower it.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.memory import thinned
from minidist.base.trace import Trace
from minidist.report.frame import Style, byte_text, finish, new_figure, patch, tidy, time_unit
from minidist.report.palette import MEMORY, PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RANKS, MAX_POINTS = 8, 500  # a panel is not wider than so many points


def memory_over_time(traces: Sequence[Trace], *, title: str = "", command: str = "") -> "Figure":
    """Draw one panel per rank that has an account (at most the first 8), rank 0 on top."""
    # Only ranks with an account of their memory.
    shown = [trace for trace in traces if trace.memory][:MAX_RANKS]
    if not shown:
        raise UsageError("the run recorded no memory; record it with account_memory(timeline=True)")
    figure = new_figure(8, 1.6 + 1.7 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]

    # All panels share the purposes, the axis of time and the scale, so that ranks can be compared.
    purposes = sorted({name for trace in shown for _, live in trace.memory for name in live}, key=_order)
    ends = [time for trace in shown for time, _ in trace.memory]
    steps = not ends or max(ends) == 0  # nothing moved the clock: draw one event after the other
    factor, unit = (1.0, "event") if steps else time_unit(max(ends))
    highest = max([1, *(sum(live.values()) for trace in shown for _, live in trace.memory)])
    scale, size = next(((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if highest >= s), (1.0, "B"))
    for panel, trace in zip(panels, shown, strict=False):
        # stacks: (purposes, events), in `scale` bytes; each column is what was alive from that event on.
        account = [*trace.memory, trace.memory[-1]] if steps else trace.memory  # the last event has a width too
        account = thinned(account, MAX_POINTS)
        times = np.arange(len(account)) if steps else np.array([time for time, _ in account]) * factor
        stacks = np.array([[live.get(name, 0) / scale for _, live in account] for name in purposes])
        panel.stackplot(times, stacks, step="post", colors=[_colour(name) for name in purposes])

        # The peak, with its label on the side where there is room.
        totals = stacks.sum(axis=0)
        peak = int(totals.argmax())
        panel.plot(times[peak], totals[peak], "v", color=PALETTE["blocked"], gid="peak", clip_on=False, zorder=5)
        text = f"peak {byte_text(round(totals[peak] * scale))}"
        left = times[peak] > 0.7 * max(times[-1], 1e-30)
        place: Style = {
            "xytext": (-6 if left else 6, 4),
            "textcoords": "offset points",
            "ha": "right" if left else "left",
        }
        panel.annotate(text, (times[peak], totals[peak]), **place, fontsize=8, color=PALETTE["blocked"])

        panel.set_ylabel(f"rank {trace.rank}\n[{size}]")
        panel.set_ylim(0, 1.25 * highest / scale)
        tidy(panel)
    panels[-1].set_xlabel("event" if steps else f"time [{unit}]")
    panels[0].set_title(title or "memory over time, by purpose", fontsize=10, loc="left")
    handles = [patch(_colour(name), name.replace("_", " ")) for name in purposes]
    return finish(figure, handles, command)


def _order(name: str) -> tuple[int, str]:
    return (list(MEMORY).index(name) if name in MEMORY else len(MEMORY), name)


def _colour(name: str) -> str:
    return MEMORY.get(name, PALETTE["other"])
