"""Two losses and a difference: curves that lie on each other prove little, the difference of the weights proves more.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Sequence

import numpy as np

from minidist.report.frame import Figure, Style, finish, line, new_figure, plain_numbers, tidy
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
    from matplotlib.ticker import MaxNLocator

    # Without weights to compare, the difference is that of the losses.
    if difference is None:
        difference, what = np.abs(np.subtract(parallel, single)).tolist(), "losses"

    # The single device as a broad line below, so that a parallel run that equals it lies inside.
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    axes.plot(range(len(single)), single, color=PALETTE["other"], linewidth=4, gid="single")
    axes.plot(range(len(parallel)), parallel, color=PALETTE["F"], linewidth=1.5, gid="parallel")
    axes.set_xlabel("step")
    axes.set_ylabel(quantity)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
    first, second_name = names or ("single device", "parallel")
    handles = [line(PALETTE["other"], first, linewidth=4), line(PALETTE["F"], second_name, linewidth=1.5)]
    if names:
        axes.set_title(title or f"{quantity} of two runs", fontsize=10, loc="left")
        return finish(figure, handles, command)

    # The difference on a second axis, which is logarithmic; an exact 0 is drawn at its lower end.
    second = axes.twinx()
    style: Style = {"color": PALETTE["blocked"], "marker": "o", "linestyle": ":", "markersize": 3}
    second.plot(range(len(difference)), np.maximum(difference, SMALLEST), **style, linewidth=0.8, gid="difference")
    second.set_yscale("log")
    plain_numbers(second.yaxis)
    second.set_ylim(SMALLEST, 10)
    second.set_ylabel(f"max |difference| of {what}", color=PALETTE["blocked"])
    second.spines["top"].set_visible(False)

    worst = max(difference, default=0.0)
    axes.set_title(title or f"parallel and single; max |difference| of {what}: {worst:.1e}", fontsize=10, loc="left")
    handles.append(
        line(label=f"max |difference| of {what}; {SMALLEST:g} stands for 0", colour=style.pop("color"), **style)
    )
    return finish(figure, handles, command)


def loss_curve(losses: Sequence[float], *, title: str = "", command: str = "") -> Figure:
    """Draw the loss per step of one run."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8, 3.2)
    axes = figure.add_subplot()
    axes.plot(
        range(len(losses)),
        losses,
        color=PALETTE["F"],
        linewidth=1.5,
        gid="loss",
        marker="o" if len(losses) < 30 else "",
        markersize=3,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
    axes.set_title(title or f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps", fontsize=10, loc="left")
    return finish(figure, [], command)
