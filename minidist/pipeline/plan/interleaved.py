"""Interleaved 1F1B: a rank holds v short stages instead of a long one, so filling the pipeline takes 1/v of the time.

    model      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        p = 4, v = 2: stage of chunk c on rank r is c*p + r
    rank         0   1   2   3   0   1   2   3

Micro-batches go in groups of p: a group through chunk 0, then through chunk 1, ...; backward the same with the chunks
reversed. Idle (p-1)(T_F + T_B)/v against the rank's own time for a whole pass, traffic x v, and more activations alive.
Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from itertools import chain

from minidist.pipeline.plan.action import B, F
from minidist.pipeline.plan.registry import Orders, schedule


def _multiple_of_p(p: int, m: int, v: int) -> str | None:
    if m % p == 0:
        return None
    below = m // p * p
    return f"it needs a multiple of {p}; take {f'{below} or ' if below else ''}{below + p}"


@schedule(
    "interleaved",
    aliases=("ScheduleInterleaved1F1B", "interleaved-1f1b", "forward_backward_pipelining_with_interleaving"),
    chunks=None,
    takes=_multiple_of_p,
)
def interleaved(p: int, m: int, v: int) -> Orders:
    """Return 1F1B over the chunks, with a warm-up of min(m v, (v-1) p + 2(p-1-r)) chunk forwards."""
    # (chunk, micro-batch) in the order of a rank's forwards: a group of p micro-batches through each chunk.
    table = [(c, first + i) for first in range(0, m, p) for c in range(v) for i in range(p)]
    orders = []
    for r in range(p):
        forwards = [F(c * p + r, i) for c, i in table]
        backwards = [B((v - 1 - c) * p + r, i) for c, i in table]
        w = min(m * v, (v - 1) * p + 2 * (p - 1 - r))
        # Warm-up, steady state (one F, one B) and cool-down: 1F1B's phases over the table of chunks.
        steady = chain.from_iterable(zip(forwards[w:], backwards, strict=False))
        orders.append([*forwards[:w], *steady, *backwards[m * v - w :]])
    return orders
