"""Two losses and a difference: curves that lie on each other prove little, the difference of the weights proves more.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.report.frame import Figure, Style, finish, line, new_panel, plain_numbers
from minidist.report.palette import PALETTE

SMALLEST = 1e-18  # where a difference of exactly 0 is drawn on a logarithmic axis


def loss_overlay(
    parallel: Sequence[float],
    single: Sequence[float],
    difference: Sequence[float] | None = None,
    *,
    what: str = "weights",
    title: str = "",
    command: str = "",
    names: tuple[str, str] | None = None,
    quantity: str = "loss",
) -> Figure:
    """Draw the loss per step of both runs, and max |difference| of `what` per step; None: of the losses.

    names: of two runs that need not be equal, the single device's first; their difference is not drawn.
    """
    # Without weights to compare, the difference is that of the losses.
    if difference is None:
        difference, what = np.abs(np.subtract(parallel, single)).tolist(), "losses"

    # The single device as a broad line below, so that a parallel run that equals it lies inside.
    figure, axes = _over_steps(4, quantity)
    axes.plot(range(len(single)), single, color=PALETTE["other"], linewidth=4, gid="single")
    axes.plot(range(len(parallel)), parallel, color=PALETTE["F"], linewidth=1.5, gid="parallel")
    first, second_name = names or ("single device", "parallel")
    handles = [line(PALETTE["other"], first, linewidth=4), line(PALETTE["F"], second_name, linewidth=1.5)]
    if names:
        return finish(figure, handles, command, title or f"{quantity} of two runs")

    # The difference on a second axis, which is logarithmic; an exact 0 is drawn at its lower end.
    second = axes.twinx()
    style: Style = {"color": PALETTE["blocked"], "marker": "o", "linestyle": ":", "markersize": 3}
    second.plot(range(len(difference)), np.maximum(difference, SMALLEST), **style, linewidth=0.8, gid="difference")
    second.set_yscale("log")
    plain_numbers(second.yaxis)
    second.set_ylim(SMALLEST, 10)
    second.set_ylabel(f"max |difference| of {what}", color=PALETTE["blocked"])
    second.spines["top"].set_visible(False)

    worst, colour = max(difference, default=0.0), style.pop("color")
    handles.append(line(colour, f"max |difference| of {what}; {SMALLEST:g} stands for 0", **style))
    said = f"parallel and single; max |difference| of {what}: {worst:.1e}"
    return finish(figure, handles, command, title or said)


def _over_steps(height: float, quantity: str) -> tuple[Figure, Any]:
    """Return a figure, and its panel of a quantity over steps, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_panel(8, height)
    axes.set(xlabel="step", ylabel=quantity)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def loss_curve(losses: Sequence[float], *, title: str = "", command: str = "") -> Figure:
    """Draw the loss per step of one run."""
    figure, axes = _over_steps(3.2, "loss")
    style: Style = {"linewidth": 1.5, "marker": "o" if len(losses) < 30 else "", "markersize": 3, "gid": "loss"}
    axes.plot(range(len(losses)), losses, color=PALETTE["F"], **style)
    return finish(figure, [], command, title or f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")
