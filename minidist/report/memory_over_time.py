"""The memory of a rank over time, stacked by purpose, with the peak marked.

The peak is what decides whether a job fits; the stack at the peak says which technique would lower it.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.memory import thinned
from minidist.base.trace import Trace
from minidist.report.frame import Style, byte_text, finish, new_figure, patch, tidy, time_unit
from minidist.report.palette import MEMORY, PALETTE, distinct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RANKS = 8
MAX_POINTS, ALL_POINTS = 500, 2000  # of a panel, which is not wider; of all panels, so that a page can hold the picture


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
    own = [name for name in purposes if name not in MEMORY]  # of the user's program; they come last
    colours = [MEMORY[name] for name in purposes if name in MEMORY]
    colours += distinct([*MEMORY.values()], len(MEMORY) + len(own))[len(MEMORY) :]
    ends = [time for trace in shown for time, _ in trace.memory]
    steps = not ends or max(ends) == 0  # nothing moved the clock: draw one event after the other
    factor, unit = (1.0, "event") if steps else time_unit(max(ends))
    highest = max([1, *(sum(live.values()) for trace in shown for _, live in trace.memory)])
    scale, size = next(((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if highest >= s), (1.0, "B"))
    for panel, trace in zip(panels, shown, strict=False):
        # stacks: (purposes, events), in `scale` bytes; each column is what was alive from that event on.
        account = [*trace.memory, trace.memory[-1]] if steps else trace.memory  # the last event has a width too
        account = thinned(account, min(MAX_POINTS, ALL_POINTS // len(shown)))
        times = np.arange(len(account)) if steps else np.array([time for time, _ in account]) * factor
        stacks = np.array([[live.get(name, 0) / scale for _, live in account] for name in purposes])
        _stack(panel, times, stacks, colours)

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
        panel.margins(x=0.01)
        tidy(panel)
    panels[-1].set_xlabel("event" if steps else f"time [{unit}]")
    panels[0].set_title(title or "memory over time, by purpose", fontsize=10, loc="left")
    handles = [patch(colour, name.replace("_", " ")) for colour, name in zip(colours, purposes, strict=True)]
    return finish(figure, handles, command)


def _stack(panel: Any, times: np.ndarray, stacks: np.ndarray, colours: Sequence[str]) -> None:
    """Draw one area per purpose on top of the one before, in as few corners as it has: most purposes rarely change."""
    below = np.zeros(len(times))
    for values, colour in zip(stacks, colours, strict=True):
        above = below + values

        # A sample at which neither edge changes is no corner.
        corner = np.ones(len(times), bool)
        corner[1:-1] = (np.diff(below)[:-1] != 0) | (np.diff(above)[:-1] != 0)
        low, high = below[corner], above[corner]

        # Nothing is drawn where the purpose has no bytes; the last sample with some reaches to the next one.
        alive = high > low
        alive[1:] |= alive[:-1].copy()
        panel.fill_between(times[corner], low, high, where=alive, step="post", color=colour, linewidth=0)
        below = above


def _order(name: str) -> tuple[int, str]:
    return (list(MEMORY).index(name) if name in MEMORY else len(MEMORY), name)
