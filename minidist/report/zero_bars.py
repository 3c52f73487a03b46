"""The ZeRO bars: what one rank holds at each stage, stacked by kind, as in figure 1 of the paper.

Proved by: tests/planning/test_zero_stages.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.report.frame import Figure, finish, new_figure, patch, tidy
from minidist.report.palette import MEMORY

COLOURS = {
    "parameters": MEMORY["parameter"],
    "gradients": MEMORY["gradient"],
    "optimizer": MEMORY["optimizer"],
    "activations": MEMORY["activation"],
    "logits": MEMORY["activation_gradient"],
    "gathered": MEMORY["unsharded"],
    "prefetch": MEMORY["communication"],
    "reducing": MEMORY["workspace"],
    "workspace": MEMORY["stash"],
    "constant": MEMORY["input"],
}


def zero_bars(stages: Mapping[str, Any], *, title: str = "", command: str = "") -> Figure:
    """Draw `stages`, as `minidist memory --json` prints them: stage -> kind -> bytes, with a total."""
    # One row per stage, its kinds of bytes one after the other, in GB.
    rows = {stage: parts for stage, parts in stages.items() if stage.startswith("stage")}
    figure = new_figure(8, 1.9 + 0.5 * len(rows))
    axes = figure.add_subplot()
    widest = max(parts["total"] for parts in rows.values())
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for name, colour in COLOURS.items():
            if parts.get(name):
                axes.barh(y, parts[name] / 1e9, left=left, height=0.6, color=colour, gid=name)
                left += parts[name] / 1e9
        axes.text(left + 0.01 * widest / 1e9, y, f"{parts['total'] / 1e9:,.1f} GB", va="center", fontsize=8)

    axes.set_yticks(range(len(rows)), [stage.replace("stage", "stage ") for stage in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * widest / 1e9)
    axes.set_xlabel("GB (1e9 B) per rank")
    tidy(axes)
    axes.set_title(title or "bytes that one rank holds", fontsize=10, loc="left")

    # The legend has the kinds that some stage holds.
    used = [name for name in COLOURS if any(parts.get(name) for parts in rows.values())]
    return finish(figure, [patch(COLOURS[name], name) for name in used], command)
