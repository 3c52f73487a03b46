"""The memory of a rank over time, stacked by purpose, with the peak marked.

The peak is what decides whether a job fits; the stack at the peak says which technique would lower it.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from minidist.base.traces import Trace
from minidist.core.base.errors import UsageError
from minidist.report.frame import Figure, Style, finish, new_figure, patch, tidy, time_unit
from minidist.report.palette import MEMORY, PALETTE, distinct

MAX_RANKS = 8
MAX_POINTS, ALL_POINTS = 500, 2000  # of a panel, which is not wider; of all panels, so that a page can hold the picture


def memory_over_time(
    traces: Sequence[Trace],
    *,
    title: str = "",
    command: str = "",
    most_bytes: int = 0,
    marks: Sequence[tuple[int, str]] = (),
) -> Figure:
    """Draw one panel per rank that has an account (at most the first 8), rank 0 on top.

    most_bytes: what the axis has room for at least, so that several pictures can have one scale. marks: (event, name)
    of what begins after that many events, such as forward; named below an axis of events, in place of numbers.
    """
    # Only ranks with an account of their memory.
    shown = [trace for trace in traces if trace.memory][:MAX_RANKS]
    if not shown:
        raise UsageError("the run recorded no memory; record it with account_memory(timeline=True)")
    figure = new_figure(8, 1.6 + 1.7 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]

    # All panels share the purposes, the axis of time and the scale, so that ranks can be compared.
    events = list(chain.from_iterable(trace.memory for trace in shown))
    colours = _colours(set().union(*(live for _, live in events)))
    last = max(time for time, _ in events)
    factor, unit = time_unit(last) if last else (None, "")
    highest = max([1, most_bytes, *(sum(live.values()) for _, live in events)])
    scale, size = _byte_unit(highest)
    for panel, trace in zip(panels, shown, strict=False):
        times, account = _samples(trace.memory, factor, min(MAX_POINTS, ALL_POINTS // len(shown)))
        # stacks: (purposes, events), in `scale` bytes; each column is what was alive from that event on.
        stacks = np.array([[live.get(name, 0) / scale for _, live in account] for name in colours])
        _stack(panel, times, stacks, colours.values())
        _mark_peak(panel, times, stacks.sum(axis=0), size)
        panel.set_ylabel(f"rank {trace.rank}\n[{size}]")
        panel.set_ylim(0, 1.25 * highest / scale)
        panel.margins(x=0.01)
        tidy(panel)
    _name_axis(panels, f"time [{unit}]" * bool(last), marks, float(times[-1]) / len(shown[-1].memory))
    handles = [patch(colour, name.replace("_", " ")) for name, colour in colours.items()]
    return finish(figure, handles, command, title or "memory over time, by purpose")


def _samples(
    memory: list[tuple[float, dict[str, int]]], factor: float | None, most: int
) -> tuple[np.ndarray, Sequence[tuple[float, dict[str, int]]]]:
    """Return at most `most` events with their places on the axis of time; without a factor it counts the events."""
    from minidist.base.memory import thinned  # a schedule has nothing to leave out

    if factor is None:
        account = thinned([*memory, memory[-1]], most)  # the last event has a width too
        return np.arange(len(account)), account
    account = thinned(memory, most)
    return np.array([time for time, _ in account]) * factor, account


def _byte_unit(highest: int) -> tuple[float, str]:
    """Return the largest unit that is at most `highest` bytes, and its name."""
    return next(((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if highest >= s), (1.0, "B"))


def _colours(names: set[str]) -> dict[str, str]:
    """Return a colour for each purpose, in the order in which they are drawn: the user program's own come last."""
    known, own = {name: colour for name, colour in MEMORY.items() if name in names}, sorted(names - MEMORY.keys())
    return known | dict(zip(own, distinct([*MEMORY.values()], len(MEMORY) + len(own))[len(MEMORY) :], strict=True))


def _name_axis(panels: Any, time: str, marks: Sequence[tuple[int, str]], event: float) -> None:
    """Name the axis of time, or that of events: by the parts that `marks` names, if any.

    event: the width of one event on the axis.
    """
    if time or not marks:
        panels[-1].set_xlabel(time or "event")
        return
    for panel in panels:
        _mark_parts(panel, [first * event for first, _ in marks], [name for _, name in marks])


def _mark_parts(panel: Any, begins: Sequence[float], names: Sequence[str]) -> None:
    """Draw a line where each part begins, and write its name below the axis; one without an event has no name."""
    panel.set_xticks(begins, [""] * len(names))
    ends = [*begins[1:], panel.dataLim.x1]
    middles = {(begin + end) / 2: name for begin, end, name in zip(begins, ends, names, strict=True) if end > begin}
    panel.set_xticks(list(middles), list(middles.values()), minor=True, fontsize=8)
    panel.tick_params(axis="x", which="minor", length=0)
    for begin in begins:
        panel.axvline(begin, color="#999999", linewidth=0.6, zorder=0)


def _mark_peak(panel: Any, times: np.ndarray, totals: np.ndarray, size: str) -> None:
    """Mark the peak, with its label in the unit of the axis, `size`, on the side where there is room."""
    peak = int(totals.argmax())
    panel.plot(times[peak], totals[peak], "v", color=PALETTE["blocked"], gid="peak", clip_on=False, zorder=5)
    text = f"peak {totals[peak]:.4g} {size}"
    left = times[peak] > 0.7 * max(times[-1], 1e-30)
    place: Style = {"xytext": (-6 if left else 6, 4), "textcoords": "offset points", "ha": "right" if left else "left"}
    panel.annotate(text, (times[peak], totals[peak]), **place, fontsize=8, color=PALETTE["blocked"])


def _stack(panel: Any, times: np.ndarray, stacks: np.ndarray, colours: Iterable[str]) -> None:
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
