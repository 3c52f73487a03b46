"""Eager 1F1B: 1F1B with twice as many forwards ahead, so that an activation arrives long before it is needed.

    rank 0   F0 F1 F2 F3 F4 .. B0 F5 B1 ..        warm-up 2(p-1-s) forwards, then one B, one F, ...
    rank 1   .. F0 F1 F2 .. B0 F3 B1 ..
    rank 2   .. .. F0 B0 F1 B1 ..

In 1F1B a stage that is about to run a forward waits for a message that its neighbour has only just sent. Here the
message has the time of a whole micro-batch, so its latency is hidden; 2(p-1-s)+1 micro-batches are alive on stage s
instead of p-s. Without latency it takes as long as 1F1B. Source: Zhuang et al., "On Optimizing the Communication of
Model Parallelism", MLSys 2023, section 4.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan import Orders
from minidist.core.pipeline.schedules import schedule, stage_order


@schedule("eager-1f1b", aliases=("Eager1F1B",))
def eager_1f1b(p: int, m: int) -> Orders:
    """Return 1F1B with a warm-up of twice the length, for any m."""
    return [stage_order(s, m, min(m, 2 * (p - 1 - s))) for s in range(p)]
