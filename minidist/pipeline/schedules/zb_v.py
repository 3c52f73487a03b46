"""ZB-V: no bubble with 1F1B's memory, because the second chunk goes back up and the loss ends where the input began.

    rank 0   stage 0 ↓        stage 2p-1 ↑   loss
    rank 1   stage 1 ↓        stage 2p-2 ↑
    rank 2   stage 2 ↓ ────── stage 2p-3 ↑         the last rank passes to itself

Rank 0 gets its first gradient as soon as it has the loss, and memory is even: 2p half-stage chunks on every rank.
Own-window idle is 0 from m = 2p-1 on when F, I and W take the same time. Fewer micro-batches get the same plan without
the rest, as in torch; the authors' program takes fewer units then, such as 39 instead of 46 for p = 8, m = 4.
Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024; torch's ScheduleZBVZeroBubble.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan import STEP, Action, F, I, Orders, W
from minidist.core.pipeline.schedules import schedule


@schedule("zb-v", aliases=("zbv", "ScheduleZBVZeroBubble"), chunks=2)
def zb_v(p: int, m: int) -> Orders:
    """Any m: planned for at least 2p-1 micro-batches, and those beyond m are dropped."""
    orders = [_rank_order(r, p, max(2 * p - 1, m)) for r in range(p)]
    return [[action for action in order if Action(action).microbatch < m] for order in orders]


def _rank_order(r: int, p: int, n: int) -> list[int]:
    down, up = r, 2 * p - 1 - r
    done = dict.fromkeys((F(down, 0), I(down, 0), W(down, 0), F(up, 0), I(up, 0), W(up, 0)), 0)
    order: list[int] = []

    def left(action: int) -> bool:
        return done[action] < n

    def add(*actions: int) -> None:
        for first in actions:
            order.append(first + done[first] * STEP)
            done[first] += 1

    f0, i0, w0, f1, i1, w1 = done
    add(*[f0] * (2 * (p - r) - 1))  # (a) Warm-up: fill the first chunks down to the last rank and back
    for _ in range(r):  # (b) Warm-up: forwards of both chunks
        add(f1, f0)
    for _ in range(p - r):  # (c) Warm-up: the first backwards, of the second chunk
        add(f1, i1, w1)
    while left(f0) or left(f1):  # (d) Steady state: one of everything
        if left(f0):
            add(f0)
        add(i0, w0, f1, i1, w1)
    for _ in range(r):  # (e) Cool-down: the input gradients first, which other ranks wait for
        add(i0, i1)
    for _ in range(p - r):  # (f) Cool-down: the first chunk's
        add(i0, w0)
    while left(w1):  # (g) Cool-down: the weight gradients, which no rank waits for
        add(w1)
    while left(w0):
        add(w0)
    return order
