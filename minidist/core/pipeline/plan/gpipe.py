"""GPipe: all forwards, then all backwards; while one micro-batch is on stage 1, the next is on stage 0.

    rank 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
    rank 1   .. F0 F1 F2 F3 .. .. B3 B2 B1 B0
    rank 2   .. .. F0 F1 F2 F3 B3 B2 B1 B0

Idle (p-1)(T_F + T_B); all m micro-batches are alive at once, so the paper recomputes activations. Source: Huang et al.,
GPipe, NeurIPS 2019. The paper runs the backwards from m-1 to 0, several libraries from 0 to m-1: `backward_order`.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan.plan import B, F, Orders, every, schedule


@schedule("gpipe", aliases=("ScheduleGPipe", "afab", "all-forward-all-backward"))
def gpipe(p: int, m: int, backward_order: str = "reversed") -> Orders:
    """Return GPipe. backward_order: "reversed" (m-1..0, the paper's) or "forward" (0..m-1, torch's)."""
    step = -1 if backward_order == "reversed" else 1
    # Warm-up: all forwards. Cool-down: all backwards. There is no steady state.
    return [[*every(F(s, 0), m), *every(B(s, 0), m)[::step]] for s in range(p)]
