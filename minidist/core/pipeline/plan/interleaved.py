"""Interleaved 1F1B: a rank holds v short stages instead of a long one, so filling the pipeline takes 1/v of the time.

    model      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        p = 4, v = 2: stage of chunk c on rank r is c*p + r
    rank         0   1   2   3   0   1   2   3

Micro-batches go in groups of p: a group through chunk 0, then through chunk 1, ...; backward the same with the chunks
reversed. Idle (p-1)(T_F + T_B)/v against the rank's own time for a whole pass, traffic x v, and more activations alive.
Where m is not a multiple of p, m is divided into max(1, m // p) larger groups, as in PyTorch, or `group` gives their
size, Megatron-LM's microbatch_group_size_per_vp_stage, and the last one has the remaining micro-batches.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2; torch's ScheduleInterleaved1F1B; Megatron-LM's
get_schedule_table.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from itertools import chain

from minidist.core.pipeline.plan.plan import B, F, Orders, schedule


@schedule(
    "interleaved",
    aliases=("ScheduleInterleaved1F1B", "interleaved-1f1b", "forward_backward_pipelining_with_interleaving"),
    chunks=None,
)
def interleaved(p: int, m: int, v: int, group: int = 0) -> Orders:
    """Return 1F1B over the chunks, with a warm-up of min(m v, (v-1) g + 2(p-1-r)) chunk forwards.

    group: micro-batches g of a group; 0: m / max(1, m // p), which is p where p divides m.
    """
    g = group or m // max(1, m // p)
    # (chunk, micro-batch) in the order of a rank's forwards: a group of g micro-batches through each chunk.
    table = [(c, i) for first in range(0, m, g) for c in range(v) for i in range(first, min(first + g, m))]
    orders = []
    for r in range(p):
        forwards = [F(c * p + r, i) for c, i in table]
        backwards = [B((v - 1 - c) * p + r, i) for c, i in table]
        w = min(m * v, (v - 1) * g + 2 * (p - 1 - r))
        # Warm-up, steady state (one F, one B) and cool-down: 1F1B's phases over the table of chunks.
        steady = chain.from_iterable(zip(forwards[w:], backwards, strict=False))
        orders.append([*forwards[:w], *steady, *backwards[m * v - w :]])
    return orders
