"""The mesh of a job: its last axis, which is the fastest and sends the most, from left to right.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Mapping, Sequence

import numpy as np

from minidist.report.frame import Figure, Style, finish, new_panel

MAX_RANKS = 256
COLOURS = ("#4477AA", "#228833", "#CCBB44", "#EE6677", "#AA3377", "#66CCEE", "#BBBBBB")


def mesh_picture(mesh: Mapping[str, int], *, title: str = "", command: str = "") -> Figure:
    """Draw one box per rank; the columns are the last axis that has more than one rank, the rows are the others.

    mesh: axis name -> ranks, slowest first. One colour for each coordinate on the first axis.
    """
    # Axes of one rank are left out, unless there is no other. numbers[coordinate] is the rank.
    axes_ = {name: n for name, n in mesh.items() if n > 1} or dict(list(mesh.items())[-1:]) or {"ranks": 1}
    names, shape = list(axes_), list(axes_.values())
    numbers = np.arange(int(np.prod(shape))).reshape(shape)

    # Rows of the last axis: ranks side by side are those that send to each other the most.
    columns = shape[-1]
    rows = numbers.reshape(-1, columns)[: MAX_RANKS // columns or 1, :64]
    figure, axes = new_panel(max(4.0, 1.5 + 0.7 * rows.shape[1]), 1.2 + 0.42 * len(rows))
    for y, row in enumerate(rows):
        # The row's coordinates on all axes but the last are its label.
        coordinate = np.unravel_index(int(row[0]), shape)
        for x, rank in enumerate(row):
            style: Style = {"ha": "center", "va": "center", "fontsize": 9, "color": "white", "gid": "rank"}
            first = np.unravel_index(int(rank), shape)[0]
            colour = COLOURS[first % len(COLOURS) if len(shape) > 1 else 0]
            axes.text(x, y, str(rank), bbox={"boxstyle": "square,pad=0.5", "color": colour}, **style)
        label = "  ".join(f"{name} {at}" for name, at in zip(names[:-1], coordinate[:-1], strict=True))
        axes.text(-0.8, y, label, ha="right", va="center", fontsize=8)

    # The coordinates on the last axis are the columns' labels.
    for x in range(rows.shape[1]):
        axes.text(x, -0.75, f"{names[-1]} {x}", ha="center", fontsize=8)
    axes.set(xlim=(-1.8 - 0.5 * len(names), rows.shape[1] - 0.4), ylim=(len(rows) - 0.4, -1.2))
    axes.set_axis_off()
    product = " x ".join(f"{name} {n}" for name, n in axes_.items())
    ranks = f"{numbers.size} rank{'s' * (numbers.size != 1)}"
    said = ranks if names == ["ranks"] else f"the mesh: {product} = {ranks}"
    return finish(figure, [], command, title or said)


def mesh_of(header: Mapping[str, object], traces: Sequence[object]) -> Mapping[str, int]:
    """Return the mesh in a trace's header; without one, all ranks in a row."""
    mesh = header.get("mesh")
    return mesh if isinstance(mesh, Mapping) and mesh else {"ranks": len(traces)}
