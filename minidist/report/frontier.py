"""The frontier of layouts: memory against tokens per second, one dot per layout, and the line that none is better than.

At its corners stand the degrees of the layout, with the range of its memory; a vertical line is what a GPU has.

Proved by: tests/commands/test_plan.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minidist.report.frame import Figure, finish, line, new_panel
from minidist.report.palette import MEMORY

MOST_LABELS = 5
SURE, PERHAPS, BEST = MEMORY["parameter"], MEMORY["activation"], MEMORY["gradient"]


def frontier(
    layouts: Sequence[Mapping[str, Any]], *, memory: float | None = None, title: str = "", command: str = ""
) -> Figure:
    """Draw layouts as `minidist plan --json` prints them. memory: the bytes that a GPU has for a peak."""
    figure, axes = new_panel(8, 4.5)
    for colour, sure in ((PERHAPS, False), (SURE, True)):
        points = [_point(layout) for layout in layouts if layout.get("fits_with_range", True) == sure]
        axes.scatter(
            *(zip(*points, strict=True) if points else ([], [])), s=12, color=colour, gid="sure" if sure else "perhaps"
        )

    # Of all layouts that need at most a given memory, the fastest.
    best: list[Mapping[str, Any]] = []
    for layout in sorted(layouts, key=_point):
        if not best or layout["tokens_per_second"] > best[-1]["tokens_per_second"]:
            best.append(layout)
    axes.step(*zip(*map(_point, best), strict=True), where="post", color=BEST, gid="frontier")
    for layout in _corners(best):
        (peak, speed), kinds = _point(layout), layout["memory"]
        between = [kinds.get(key, kinds["peak_bytes"]) / 1e9 for key in ("low_bytes", "high_bytes")]
        axes.plot(between, [speed] * 2, color=BEST, lw=1)
        # On the side on which there is room.
        place, side = ((-4, 6), "right") if peak > 0.3 * _point(best[-1])[0] else ((8, -8), "left")
        text = axes.annotate(degrees(layout), (peak, speed), place, textcoords="offset points", fontsize=6.5, ha=side)
        text.set(gid="corner", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})
    handles = [
        line(SURE, "surely fits", marker="o", linestyle="", markersize=4),
        line(PERHAPS, "may not fit", marker="o", linestyle="", markersize=4),
        line(BEST, "the fastest, with its range"),
    ]
    if memory is not None:
        axes.axvline(memory / 1e9, color="#333333", linestyle="--", lw=1, gid="memory")
        handles.append(line("#333333", f"{memory / 1e9:,.0f} GB of a GPU", linestyle="--"))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="peak of the fullest GPU, GB (1e9 B)", ylabel="tokens per second")
    axes.set(xlim=0, ylim=(0, 1.1 * best[-1]["tokens_per_second"]))
    return finish(figure, handles, command, title or "layouts that fit")


def _point(layout: Mapping[str, Any]) -> tuple[float, float]:
    return layout["memory"]["peak_bytes"] / 1e9, layout["tokens_per_second"]


def degrees(layout: Mapping[str, Any]) -> str:
    """Return the degrees of a layout that are above 1, and its ZeRO stage, such as "dp 8, tp 2, zero 1"."""
    parts = [f"{axis} {layout[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if layout.get(axis, 1) > 1]
    zero = layout.get("zero", 0)
    return ", ".join([*parts, *[f"zero {zero}"] * (zero > 0)]) or "one GPU"


def _corners(best: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the corners that are labelled: the fastest that surely fits, and others that are far enough below."""
    sure = [layout for layout in best if layout.get("fits_with_range", True)]
    chosen: list[Mapping[str, Any]] = []
    for layout in reversed(sure or best):
        if not chosen or layout["tokens_per_second"] < 0.88 * chosen[-1]["tokens_per_second"]:
            chosen.append(layout)
    return chosen[:MOST_LABELS]
