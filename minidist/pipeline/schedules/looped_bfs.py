"""Looped breadth-first: all micro-batches through chunk 0, then all through chunk 1, ...; and back.

    rank r   chunk 0: F0 F1 F2 F3   chunk 1: F0 F1 F2 F3   chunk 1: B3 B2 B1 B0   chunk 0: B3 B2 B1 B0

All activations are alive at the turn, m v chunks per rank. In return a stage's weights are needed in one stretch,
so sharded weights are gathered once per pass. Source: Lamy-Poirier, Breadth-first pipeline parallelism, MLSys 2023.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan import B, F, Orders, every
from minidist.core.pipeline.schedules import schedule


@schedule("looped-bfs", aliases=("ScheduleLoopedBFS", "breadth-first"), chunks=None)
def looped_bfs(p: int, m: int, v: int) -> Orders:
    """Return all micro-batches through each chunk in turn, and back, for any m."""
    # Warm-up: all forwards, chunk by chunk. Cool-down: all backwards, the chunks reversed.
    return [
        [f for c in range(v) for f in every(F(c * p + r, 0), m)]
        + [b for c in reversed(range(v)) for b in every(B(c * p + r, 0), m)[::-1]]
        for r in range(p)
    ]
