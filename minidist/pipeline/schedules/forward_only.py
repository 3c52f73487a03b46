"""Forward only: evaluation. Nothing is kept, nothing comes back.

rank 0   F0 F1 F2 F3
rank 1   .. F0 F1 F2 F3
rank 2   .. .. F0 F1 F2 F3

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan import F, Orders, every
from minidist.core.pipeline.schedules import schedule


@schedule("forward-only", aliases=("evaluation", "inference"), chunks=None, updates="none")
def forward_only(p: int, m: int, v: int) -> Orders:
    """Return the chunks one after the other, each with all micro-batches."""
    return [[f for c in range(v) for f in every(F(c * p + r, 0), m)] for r in range(p)]
