"""The ZeRO bars: what one rank holds at each stage, stacked by kind, as in figure 1 of the paper.

Proved by: tests/planning/test_zero_stages.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.report.frame import Figure, finish, name_rows, new_panel, patch
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
    figure, axes = new_panel(8, 1.9 + 0.5 * len(rows))
    widest = max(parts["total"] for parts in rows.values())
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for name, colour in COLOURS.items():
            if parts.get(name):
                axes.barh(y, parts[name] / 1e9, left=left, height=0.6, color=colour, gid=name)
                left += parts[name] / 1e9
        axes.text(left + 0.01 * widest / 1e9, y, f"{parts['total'] / 1e9:,.1f} GB", va="center", fontsize=8)

    name_rows(axes, [stage.replace("stage", "stage ") for stage in rows])
    axes.set(xlim=(0, 1.15 * widest / 1e9), xlabel="GB (1e9 B) per rank")

    # The legend has the kinds that some stage holds.
    used = [name for name in COLOURS if any(parts.get(name) for parts in rows.values())]
    handles = [patch(COLOURS[name], name) for name in used]
    return finish(figure, handles, command, title or "bytes that one rank holds")
