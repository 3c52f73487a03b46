"""ZB-V: no bubble with 1F1B's memory, because the second chunk goes back up and the loss ends where the input began.

    rank 0   stage 0 ↓        stage 2p-1 ↑   loss
    rank 1   stage 1 ↓        stage 2p-2 ↑
    rank 2   stage 2 ↓ ────── stage 2p-3 ↑         the last rank passes to itself

Rank 0 gets its first gradient as soon as it has the loss, and memory is even: 2p half-stage chunks on every rank.
Own-window idle is 0 from m = 2p-1 on when F, I and W take the same time. Source: Qi et al., Pipeline Parallelism with
Controllable Memory, NeurIPS 2024.
"""

from minidist.pipeline.plan.action import F, I, W, kind_of, microbatch_of, pack
from minidist.pipeline.plan.registry import Orders, schedule


@schedule("zb-v", aliases=("zbv", "ScheduleZBVZeroBubble"), chunks=2)
def zb_v(p: int, m: int) -> Orders:
    """Planned for at least 2p-1 micro-batches; what is too much is dropped, so any m will do."""
    orders = [_rank_order(r, p, max(2 * p - 1, m)) for r in range(p)]
    return [[action for action in order if microbatch_of(action) < m] for order in orders]


def _rank_order(r: int, p: int, n: int) -> list[int]:
    down, up = r, 2 * p - 1 - r
    done = dict.fromkeys((F(down, 0), I(down, 0), W(down, 0), F(up, 0), I(up, 0), W(up, 0)), 0)
    order: list[int] = []

    def left(action: int) -> bool:
        return done[action] < n

    def add(*actions: int) -> None:
        for first in actions:
            order.append(pack(kind_of(first), down if first in below else up, done[first]))
            done[first] += 1

    f0, i0, w0, f1, i1, w1 = done
    below = {f0, i0, w0}
    add(*[f0] * (2 * (p - r) - 1))  # (a) fill
    for _ in range(r):  # (b) two streams of forwards
        add(f1, f0)
    for _ in range(p - r):  # (c) the first backwards
        add(f1, i1, w1)
    while left(f0) or left(f1):  # (d) steady state
        if left(f0):
            add(f0)
        add(i0, w0, f1, i1, w1)
    for _ in range(r):  # (e) hurry with the input gradients
        add(i0, i1)
    for _ in range(p - r):  # (f)
        add(i0, w0)
    while left(w1):  # (g) what waits for nobody
        add(w1)
    while left(w0):
        add(w0)
    return order
