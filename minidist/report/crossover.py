"""Latency or bandwidth: time over bytes, one line per algorithm, and where the best one changes.

Both axes are logarithmic. A line is flat while latency decides (its height: the number of rounds) and rises once bytes
do (its place: how often each byte is sent). The dotted line is what "auto" takes; verticals mark where its
choice changes.

Proved by: tests/bench/test_collectives.py
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.report.frame import Figure, Style, finish, line, new_panel, plain_numbers
from minidist.report.palette import distinct

COLOURS = ("#4477AA", "#228833", "#CCBB44", "#66CCEE", "#EE6677", "#AA3377", "#EE8866", "#44AA99", "#332288", "#999933")
OTHERS = {"MPI_Allreduce": "#882255", "gloo": "#777777"}


def crossover(rows: Sequence[dict[str, Any]], *, title: str = "", command: str = "") -> Figure:
    """Draw one line per side.

    rows: `bytes`, `side` (an algorithm, "auto", an opponent), `algorithm` (the choice of "auto") and `median_s` each.
    """
    # points[side][bytes]: seconds.
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        points.setdefault(row["side"], {})[row["bytes"]] = row["median_s"]
    points.pop("best of ours", None)

    figure, axes = new_panel(9, 5.2)

    # One line per algorithm, always in the same colour; opponents are dashed.
    handles = []
    names = sorted(name for name in points if name != "auto" and name not in OTHERS)
    colour = dict(zip(names, distinct(COLOURS, len(names)), strict=True)) | OTHERS
    for name in (*names, *(name for name in OTHERS if name in points)):
        sizes = sorted(points[name])
        style: Style = {"linestyle": "--"} if name in OTHERS else {}
        axes.plot(sizes, [1e6 * points[name][n] for n in sizes], color=colour[name], linewidth=1.4, gid=name, **style)
        handles.append(line(colour[name], name, **style))

    if "auto" in points:
        style = {"linestyle": ":", "linewidth": 2.4}
        sizes = sorted(points["auto"])
        axes.plot(sizes, [1e6 * points["auto"][n] for n in sizes], color="black", gid="auto", **style)
        handles.append(line("black", "auto", **style))
        _choices(axes, {row["bytes"]: row["algorithm"] for row in rows if row["side"] == "auto"})

    # On two logarithmic axes a time that is proportional to the bytes is a line of slope 1.
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.set(xlabel="bytes of the array", ylabel="µs, log scale")
    return finish(figure, handles, command, title or "time of a collective over its size")


def _choices(axes: Any, taken: dict[int, str]) -> None:
    """Name what "auto" takes, and draw a vertical between two sizes at which its choice differs. taken: by bytes."""
    sizes = sorted(taken)
    for i, (before, after) in enumerate(pairwise(sizes)):
        if taken[before] != taken[after]:
            axes.axvline((before * after) ** 0.5, color="#BBBBBB", linewidth=0.8, zorder=0)
        if i == 0 or taken[sizes[i - 1]] != taken[before]:
            axes.text(before, 0.985, taken[before], transform=axes.get_xaxis_transform(), fontsize=7, va="top")
