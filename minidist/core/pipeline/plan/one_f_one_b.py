"""1F1B (PipeDream-Flush): a stage runs each backward as early as it can, which frees the oldest activations.

    rank 0   F0 F1|F2 .. .. B0 F3 B1|.. B2 .. B3     [1] warm-up: p-1-s forwards
    rank 1   .. F0|F1 .. B0 F2 B1 F3 B2|.. B3        [2] steady state: one F, one B
    rank 2   .. ..|F0 B0 F1 B1 F2 B2 F3 B3|          [3] cool-down: the backwards that are left

Idle as GPipe's, (p-1)(T_F + T_B), but only min(m, p-s) micro-batches are alive on stage s. Source: Narayanan et al.,
PipeDream-2BW, ICML 2021; Megatron-LM's default.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from itertools import chain

from minidist.core.pipeline.plan.plan import B, F, Orders, every, schedule


@schedule(
    "1f1b", aliases=("Schedule1F1B", "pipedream-flush", "forward_backward_pipelining_without_interleaving", "dapple")
)
def one_f_one_b(p: int, m: int) -> Orders:
    """Return 1F1B for any m, also fewer than p."""
    return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]


def stage_order(s: int, m: int, warm_up: int) -> list[int]:
    """Return a stage's order: `warm_up` forwards, then F and B in turn, then the backwards that are left."""
    forwards, backwards = every(F(s, 0), m), every(B(s, 0), m)
    # [1] Warm-up: fill the stages behind this one, until the first gradient comes back.
    order = list(forwards[:warm_up])
    # [2] Steady state: as many micro-batches begin as end; the zip ends with the forwards.
    order += chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    # [3] Cool-down.
    return order + list(backwards[m - warm_up :])
