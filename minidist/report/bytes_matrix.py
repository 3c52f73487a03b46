"""Bytes from rank to rank: a ring is a diagonal here, a root is a row and a column, a mesh is small blocks.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence

import numpy as np

from minidist.base.traces import Trace
from minidist.report.frame import Figure, Style, byte_text, finish, new_figure, patch
from minidist.report.palette import PALETTE

PURPLE = PALETTE["communication"]
MAX_NUMBERS = 12  # ranks up to which each cell's bytes are written out


def matrix_of(traces: Sequence[Trace], purpose: str | None = None) -> np.ndarray:
    """Return int64 of shape (ranks, ranks): bytes that row sent to column, of one purpose or of all."""
    # A trace file may lack ranks, but its messages name them.
    size = max(len(traces), *(trace.size for trace in traces))
    matrix = np.zeros((size, size), dtype=np.int64)
    for trace in traces:
        for message in trace.sent(purpose):
            matrix[trace.rank, message.peer] += message.nbytes
    return matrix


def bytes_matrix(traces: Sequence[Trace], *, purpose: str | None = None, title: str = "", command: str = "") -> Figure:
    """Draw bytes sent by (rows, rank 0 on top) and to (columns)."""
    from matplotlib.colors import LinearSegmentedColormap

    # Transparent is nothing, the full colour the most bytes between two ranks: so it is right on white and on black.
    matrix = matrix_of(traces, purpose)
    size = len(matrix)
    figure = new_figure(max(6.0, min(8, 0.7 * size + 2)), max(4.0, min(7.5, 0.6 * size + 2)))
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("communication", [f"{PURPLE}00", f"{PURPLE}44", PURPLE])
    image = axes.imshow(matrix, cmap=colours, vmin=0, vmax=max(int(matrix.max()), 1))

    # Numbers in the cells, as long as they can be read.
    if size <= MAX_NUMBERS:
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        for source, to in zip(*np.nonzero(matrix), strict=True):
            dark = matrix[source, to] > 0.6 * matrix.max()
            style: Style = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if dark else "black"}
            axes.text(to, source, byte_text(matrix[source, to]), **style)

    # As a matrix is read: rows from top to bottom, columns named above.
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()

    # The largest sum of a row is what the busiest sender sends.
    rows = matrix.sum(axis=1)
    what = f" of {purpose}" if purpose else ""
    sums = f"{byte_text(matrix.sum())}{what} sent in all; the most by one rank: {byte_text(rows.max())}"
    axes.set_title(title or sums, fontsize=9)
    figure.colorbar(image, ax=axes, label="bytes", shrink=0.8, format=lambda value, place: byte_text(value))
    return finish(figure, [patch("#FFFFFF", "no message"), patch(PURPLE, "the most bytes between two ranks")], command)
