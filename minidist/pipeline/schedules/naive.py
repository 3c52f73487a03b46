"""The naive pipeline: one stage works, and all others wait. Other schedules are compared with this one.

rank 0   F0 .. .. .. .. B0 F1 ...
rank 1   .. F0 .. .. B0 .. ..
rank 2   .. .. F0 B0 .. .. ..          with two or more micro-batches they go through one after the other

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan import B, F, Orders
from minidist.core.pipeline.schedules import schedule


@schedule("naive", aliases=("sequential", "model-parallel"))
def naive(p: int, m: int) -> Orders:
    """Return F and B of each micro-batch in turn; every rank idles (p-1)/p of the time."""
    return [[action for i in range(m) for action in (F(s, i), B(s, i))] for s in range(p)]
