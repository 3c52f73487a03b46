"""The frontier of layouts: memory against tokens per second, one dot per layout, and the line that none is better than.

Proved by: tests/commands/test_plan.py
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.report.frame import finish, line, new_figure, tidy
from minidist.report.palette import MEMORY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def frontier(layouts: Sequence[Mapping[str, Any]], *, title: str = "", command: str = "") -> "Figure":
    """Draw layouts as `minidist plan --json` prints them, each with memory, tokens_per_second and its degrees."""
    points = sorted((layout["memory"]["peak_bytes"] / 1e9, layout["tokens_per_second"]) for layout in layouts)
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    memory, speeds = zip(*points, strict=True)
    axes.scatter(memory, speeds, s=12, color=MEMORY["parameter"], gid="layouts")

    # Of all layouts that need at most so much memory, the fastest.
    best: list[tuple[float, float]] = []
    for peak, speed in points:
        if not best or speed > best[-1][1]:
            best.append((peak, speed))
    axes.step(*zip(*best, strict=True), where="post", color=MEMORY["gradient"], gid="frontier")
    axes.set_xlabel("peak of the fullest GPU, GB (1e9 B)")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(0)
    tidy(axes)
    axes.set_title(title or "layouts that fit", fontsize=10, loc="left")
    handles = [
        line(MEMORY["parameter"], "a layout (central estimates)", marker="o", linestyle="", markersize=4),
        line(MEMORY["gradient"], "the fastest with that much memory"),
    ]
    return finish(figure, handles, command)
