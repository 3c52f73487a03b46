"""ZB-H1 and ZB-H2: no rank waits for a weight gradient, so weight gradients fill the time in which a stage would wait.

1F1B's backward is two computations: I, the input gradient, which the stage before needs at once; and W, the weight
gradient, which only the optimizer needs. Split them, run I first, and run W in the idle time:

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 .. I2 W2 .. I3 W3      k = 1: memory of 1F1B, idle (p-1)(T_F + T_I - T_W)
    rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3            stage s is k*s weight gradients behind

With k = 2 there are 2(p-1-s) forwards before the first backward: idle (p-1)(T_F + T_I - 2 T_W) in a rank's own window,
for 2p-1 micro-batches alive. "Own window" because ranks start and end at different times: the next step must begin
without a global barrier. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.

ZB-V: no bubble with 1F1B's memory, because the second chunk goes back up and the loss ends where the input began.

    rank 0   stage 0 ↓        stage 2p-1 ↑   loss
    rank 1   stage 1 ↓        stage 2p-2 ↑
    rank 2   stage 2 ↓ ────── stage 2p-3 ↑         the last rank passes to itself

Rank 0 gets its first gradient as soon as it has the loss, and memory is even: 2p half-stage chunks on every rank.
Own-window idle is 0 from m = 2p-1 on when F, I and W take the same time. Fewer micro-batches get the same plan without
the rest, as in torch; the authors' program takes fewer units then, such as 39 instead of 46 for p = 8, m = 4.
Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024; torch's ScheduleZBVZeroBubble.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan.plan import STEP, Action, F, I, W, every
from minidist.core.pipeline.plan.registry import Orders, schedule


def _zero_bubble(p: int, m: int, k: int) -> Orders:
    return [_stage_order(s, m, min(m, k * (p - 1 - s)), k * s) for s in range(p)]


def _stage_order(s: int, m: int, warm_up: int, lag: int) -> list[int]:
    forwards, weights = every(F(s, 0), m), every(W(s, 0), m)
    # Warm-up: k times as many forwards ahead as 1F1B.
    order = list(forwards[:warm_up])
    # Steady state: a forward, an input gradient, and the weight gradient of `lag` micro-batches ago.
    for b in range(m):
        if warm_up + b < m:
            order.append(forwards[warm_up + b])
        order.append(I(s, b))
        if b >= lag:
            order.append(weights[b - lag])
    # Cool-down: the weight gradients that were put off.
    return order + list(weights[max(0, m - lag) :])


@schedule("zb-h1", aliases=("zb1p", "zero-bubble", "ScheduleZBH1"))
def zb_h1(p: int, m: int) -> Orders:
    """Return ZB-H1: at most p micro-batches alive, W's share counted until W."""
    return _zero_bubble(p, m, 1)


@schedule("zb-h2", aliases=("zb2p", "ScheduleZBH2"))
def zb_h2(p: int, m: int) -> Orders:
    """Return ZB-H2: at most 2p-1 micro-batches alive."""
    return _zero_bubble(p, m, 2)


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
