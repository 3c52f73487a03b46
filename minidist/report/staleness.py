"""Throughput, staleness and loss of a parameter server under several consistencies, side by side.

Proved by: tests/bench/test_staleness.py
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from minidist.report.frame import Figure, finish, line, new_figure, tidy
from minidist.report.palette import PALETTE, distinct

COLOURS = [PALETTE[name] for name in ("F", "B", "communication", "W", "I", "recompute")]


def staleness(runs: Sequence[Any], *, title: str = "", command: str = "") -> Figure:
    """Draw the three panels.

    runs: each with consistency, gradients_per_second, staleness (one number per gradient), curve [(seconds, loss)] and
    entropy.
    """
    from matplotlib.ticker import MaxNLocator

    # Left: how fast. Middle: how old the weights were that each gradient was computed with. Right: the loss over
    # virtual time.
    figure = new_figure(9.5, 3.8)
    rate, histogram, losses = figure.subplots(1, 3, width_ratios=(1, 1.3, 1.5))
    used = distinct(COLOURS, len(runs))
    for x, (run, colour) in enumerate(zip(runs, used, strict=True)):
        rate.bar(x, run.gradients_per_second, color=colour, width=0.7, gid="rate")
        rate.text(x, run.gradients_per_second, f"{run.gradients_per_second:.0f}", ha="center", va="bottom", fontsize=8)
        # At each staleness the bars of all runs are side by side.
        counts = Counter(run.staleness)
        total, width = max(1, len(run.staleness)), 0.8 / len(runs)
        places = [value + (x - (len(runs) - 1) / 2) * width for value in sorted(counts)]
        shares = [counts[value] / total for value in sorted(counts)]
        histogram.bar(places, shares, width=width, color=colour, gid="staleness")
        seconds, values = zip(*run.curve, strict=True)
        losses.plot(seconds, values, color=colour, linewidth=1.4, gid="loss")

    rate.set_xticks(range(len(runs)), [run.consistency for run in runs], fontsize=8)
    rate.set_title("gradients per second", fontsize=9, loc="left")
    histogram.set_title("staleness: updates not yet seen", fontsize=9, loc="left")
    histogram.set_ylabel("share of the gradients", fontsize=8)
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.set_title("loss", fontsize=9, loc="left")
    losses.set_xlabel("virtual seconds", fontsize=8)
    entropy = runs[0].entropy
    losses.axhline(entropy, color=PALETTE["other"], linestyle=":", linewidth=1)
    for axes in (rate, histogram, losses):
        tidy(axes)
        axes.tick_params(labelsize=8)
    figure.suptitle(title or "a parameter server with one slow worker", fontsize=10, x=0.01, ha="left")
    handles = [line(colour, run.consistency, linewidth=4) for run, colour in zip(runs, used, strict=True)]
    return finish(figure, [*handles, line(PALETTE["other"], "entropy: no model is better", linestyle=":")], command)
