"""1F1B (PipeDream-Flush): as early as it can, a stage runs the backward that frees the oldest micro-batch's
activations.

    rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3     warm-up p-1-s forwards, then one F, one B, ...
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3

Idle as GPipe's, (p-1)(T_F + T_B), but only min(m, p-s) micro-batches are alive on stage s. Source: Narayanan et al.,
PipeDream-2BW, ICML 2021; Megatron-LM's default.
"""

from itertools import chain

from minidist.pipeline.plan.action import B, F, every
from minidist.pipeline.plan.registry import Orders, schedule


@schedule(
    "1f1b", aliases=("Schedule1F1B", "pipedream-flush", "forward_backward_pipelining_without_interleaving", "dapple")
)
def one_f_one_b(p: int, m: int) -> Orders:
    """Any m, also fewer than p."""
    return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]


def stage_order(s: int, m: int, warm_up: int) -> list[int]:
    """`warm_up` forwards, then F and B in turn, then the backwards that are left."""
    forwards, backwards = every(F(s, 0), m), every(B(s, 0), m)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))  # zip ends with the forwards
    return [*forwards[:warm_up], *steady, *backwards[m - warm_up :]]
