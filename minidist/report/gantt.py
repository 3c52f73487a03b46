"""The Gantt of a plan: one row per rank, one bar per action with its micro-batch number, the bubble in the title.

As text it fits a terminal; as a picture it is the one of the lessons. Several schedules are drawn below each other on
one axis of time, so that the shorter one looks shorter. Under each picture one strip per rank shows how many
micro-batches' activations are alive, from F to B (or W): what the shorter time costs.

Proved by: tests/commands/test_schedule.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.traces import SpanEvent, Trace
from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan import Item, actions_of
from minidist.pipeline.plan_methods import show
from minidist.pipeline.timing import Timing
from minidist.report.frame import Figure, Style, finish, name_rows, new_figure, patch, tidy
from minidist.report.palette import NAMES, PALETTE, ink, shade

MAX_BARS, MAX_ROWS = 20_000, 40
POINTS = 720  # the width of a panel


def label(item: Item, chunked: bool) -> str:
    """Return F3; with several stages on a rank F3.1: micro-batch 3 on stage 1."""
    return "+".join(
        f"{'R' if a.kind == 'RECOMPUTE' else a.kind}{a.microbatch}{f'.{a.stage}' if chunked else ''}"
        for a in actions_of(item)
    )


def title_of(timing: Timing) -> str:
    """Return name, sizes and bubble, in both conventions."""
    plan = timing.plan
    return (
        f"{plan.name}, {plan.ranks} ranks, {plan.microbatches} micro-batches: bubble {100 * timing.bubble_of_ideal:.1f}"
        f" % of ideal, {100 * timing.bubble_of_total:.1f} % of total"
    )


def numbers(values: Sequence[float]) -> str:
    """Return "9 6 3 0"; of many numbers the first and the last."""
    texts = [f"{value:g}" for value in values]
    return " ".join(texts if len(texts) <= 16 else [*texts[:8], "..", *texts[-4:]])


def activation_of(timing: Timing) -> str:
    """Return what the peak counts: where a rank has several stages, an activation is that of one of them."""
    several = timing.plan.stages > timing.plan.ranks and timing.stage_share == 1
    return "activations, each of one stage and one micro-batch" if several else "micro-batch activations"


def text_gantt(
    timing: Timing, width: int = 100, versions: Sequence[int] | None = None, longest: float | None = None
) -> str:
    """Return lines of at most `width` characters: title, one row per rank (if the timing has spans), and the figures.

    longest: the end of the axis of time.
    """
    # Without spans there are figures only: a large plan is timed without keeping them.
    spans = timing.spans
    if spans is None:
        return "\n".join([title_of(timing)[:width], *_figures(timing, width, versions)]) + "\n"

    # Characters per unit of time: the widest label fits into the shortest action, unless the line would be too long.
    margin = len(f"rank {len(spans) - 1} ")
    longest = longest or timing.makespan or 1.0
    room = max(width - margin, 10)
    shortest = min((end - start for row in spans for _, start, end in row if end > start), default=longest)
    chunked = timing.plan.stages > timing.plan.ranks
    widest = max((len(label(item, chunked)) for row in spans for item, _, _ in row), default=1)
    scale = min(room / longest, (widest + 1) / shortest)
    if scale * shortest >= 1:
        scale = int(scale * shortest) / shortest

    # The first and the last ranks, when there are more rows than a terminal shows.
    hidden = range(MAX_ROWS // 2, len(spans) - MAX_ROWS // 2) if len(spans) > MAX_ROWS else ()
    length = min(room, round(longest * scale))
    lines = [
        (f"rank {rank} ".ljust(margin) + _cells(row, length, scale, chunked)).rstrip()
        for rank, row in enumerate(spans)
        if rank not in hidden
    ]
    if hidden:
        lines.insert(MAX_ROWS // 2, "...")
    return "\n".join([title_of(timing)[:width], *lines, *_figures(timing, width, versions)]) + "\n"


def _cells(row: Sequence[tuple[Item, float, float]], length: int, scale: float, chunked: bool) -> str:
    """Return a row of a rank: it begins idle (blanks); each action overwrites its characters with label and dashes."""
    cells = [" "] * length
    for item, start, end in row:
        first, last = round(start * scale), min(len(cells), round(end * scale))
        text = label(item, chunked)
        if last - first < len(text):
            # No room for the number: the kind alone, repeated.
            text = text[0] * (last - first)
        cells[first:last] = text.ljust(last - first, "-") if last > first else ""
    return "".join(cells)


def _figures(timing: Timing, width: int, versions: Sequence[int] | None) -> list[str]:
    held = f"peak {numbers(timing.activations)} {activation_of(timing)}"
    if timing.peak_bytes:
        held += f" = {numbers(timing.peak_bytes)} B"
    if versions is not None:
        held += f" | weight versions {numbers(versions)}"
    ends = f"makespan {timing.makespan:g} | cost {timing.cost:g} | lower bound {timing.lower_bound:g}"
    return [f"idle {numbers(timing.idle)} | {ends}"[:width], held[:width]]


def gantt(timings: Sequence[Timing], command: str = "", titles: Sequence[str] = ()) -> Figure:
    """Draw one panel per timing (made with spans=True), all on the same axis of time.

    titles: one per panel, in place of its sizes and its bubble.
    """
    _check_readable(timings)

    longest = max(timing.makespan for timing in timings)
    figure, panels = panels_of(timings, 0.3)

    # One scale for all strips, too.
    used: set[str] = set()
    highest = max((peak for timing in timings for peak in timing.activations), default=1) or 1
    for number, timing in enumerate(timings):
        title = titles[number] if titles else title_of(timing)
        _panel(timing, panels[2 * number], longest, used, title)
        _strips(timing, panels[2 * number + 1], highest)

    # The legend has what was drawn, in the palette's order.
    kinds = [kind for kind in ("F", "B", "I", "W", "recompute", "idle") if kind in used]
    handles = [patch(PALETTE[kind], NAMES[kind]) for kind in kinds]
    handles += [
        patch(shade(PALETTE["F"], chunk), f"lighter: stage {chunk + 1} of its rank")
        for chunk in range(1, 3)
        if f"stage {chunk}" in used
    ]
    return finish(figure, [*handles, patch(PALETTE["other"], "activations alive")], command)


def panels_of(timings: Sequence[Timing], row: float) -> tuple[Figure, Any]:
    """Return a figure with a panel and one for strips below it for each timing, all on one axis of time.

    row: inches of a rank in a panel.
    """
    sizes = [timing.plan.ranks for timing in timings]
    heights = [height for ranks in sizes for height in (0.7 + row * ranks, 0.3 + 0.16 * ranks)]
    figure = new_figure(11, sum(heights) + 0.9)
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    panels[-1].set_xlabel("time")
    for number, axes in enumerate(panels):
        ranks = [f"rank {rank}" for rank in range(sizes[number // 2])]
        top, size = (-0.55, 5.5) if number % 2 else (-0.5, 7)  # strips are smaller
        name_rows(axes, ranks, top, fontsize=size)
        tidy(axes)
    return figure, panels


def _check_readable(timings: Sequence[Timing]) -> None:
    """Refuse what cannot be drawn, or could not be read, before matplotlib begins."""
    if not timings:
        raise UsageError("there is no plan to draw; give at least one")
    if any(timing.spans is None for timing in timings):
        raise UsageError("a Gantt needs the spans of a plan; call time_plan(plan, spans=True)")
    bars = sum(len(row) for timing in timings for row in timing.spans or [])
    if bars > MAX_BARS:
        raise UsageError(
            f"a picture of {bars:,} actions would not be readable; draw at most {MAX_BARS:,}, or take --format perfetto"
        )


def _panel(timing: Timing, axes: Any, longest: float, used: set[str], title: str) -> None:
    for rank, row in enumerate(timing.spans or []):
        # From the rank's first action to its last: what no bar covers is idle.
        if row:
            axes.barh(rank, row[-1][2] - row[0][1], left=row[0][1], height=0.86, color=PALETTE["idle"], zorder=0)
            used.add("idle")
        # A rank with several stages has a shade for each.
        stages = sorted({action.stage for item, _, _ in row for action in actions_of(item)})
        used.update(f"stage {chunk}" for chunk in range(1, len(stages)))
        for item, start, end in row:
            # Two actions that run as one (F and B overlapped) share the height of the row.
            pieces = actions_of(item)
            for number, action in enumerate(pieces):
                kind = "recompute" if action.kind == "RECOMPUTE" else action.kind
                used.add(kind)
                height = 0.86 / len(pieces)
                y = rank - 0.43 + height * (number + 0.5)
                colour = shade(PALETTE[kind], stages.index(action.stage))
                style: Style = {"color": colour, "edgecolor": "white", "linewidth": 0.5, "gid": show(item)}
                axes.barh(y, end - start, left=start, height=height, **style)
                # The number, as large as the bar is wide; smaller ones are read after zooming.
                text = str(action.microbatch)
                size = min(6.5, POINTS * (end - start) / longest / (0.7 * len(text)))
                if size >= 1.5:
                    axes.text((start + end) / 2, y, text, ha="center", va="center", fontsize=size, color=ink(colour))
    axes.set_xlim(0, longest or 1)
    axes.set_title(title, fontsize=9, loc="left")


def alive(row: Sequence[tuple[Item, float, float]]) -> tuple[list[float], list[int]]:
    """Return times, and how many micro-batches' activations are alive on a rank from each time on."""
    # +1 when a forward begins to keep its input, -1 when the backward that needs it has ended.
    changes: list[tuple[float, int]] = []
    for item, start, end in row:
        for action in actions_of(item):
            if action.kind == "F":
                changes.append((start, 1))
            elif action.kind in ("B", "W"):
                changes.append((end, -1))
    times, counts, now = [0.0], [0], 0
    for time, change in sorted(changes):  # what ends is released before what begins
        now += change
        times.append(time)
        counts.append(now)
    return times, counts


def _strips(timing: Timing, axes: Any, highest: float) -> None:
    """Draw the activations that are alive on each rank, all on one scale."""
    strips = [
        (times, [timing.stage_share * count / highest for count in counts], f"{peak:g}")
        for (times, counts), peak in zip(map(alive, timing.spans or []), timing.activations, strict=True)
    ]
    unit = "micro-batches"
    if timing.plan.stages > timing.plan.ranks and timing.stage_share == 1:
        unit = "stage parts of micro-batches"
    draw_strips(
        axes, strips, PALETTE["other"], f"activations alive, peak {numbers(timing.activations)} {unit}", "alive"
    )


def draw_strips(
    axes: Any, strips: Sequence[tuple[Sequence[float], Sequence[float], str]], colour: str, title: str, gid: str
) -> None:
    """Draw one strip per rank: (times, height from each time on as a share of the highest, the peak in words)."""
    for rank, (times, heights, peak) in enumerate(strips):
        # The strip is filled from its bottom line up; rows grow downwards.
        bottom = rank + 0.45
        top = [bottom - 0.9 * height for height in heights]
        axes.fill_between(times, top, bottom, step="post", color=colour, linewidth=0, gid=f"{gid} {rank}")
        axes.text(1.004, rank, peak, transform=axes.get_yaxis_transform(), fontsize=6.5, va="center")
    axes.set_title(title, fontsize=7, loc="left", pad=2)


def as_traces(timing: Timing) -> list[Trace]:
    """Return the plan's times as a recorded run, one unit of time as one second."""
    size = timing.plan.ranks
    return [
        Trace(rank, size, spans=[SpanEvent(rank, "main", show(item), start, end) for item, start, end in row])
        for rank, row in enumerate(timing.spans or [])
    ]
