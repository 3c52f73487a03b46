"""ZB-H1 and ZB-H2: no rank waits for a weight gradient, so weight gradients fill the time in which a stage would wait.

1F1B's backward is two computations: I, the input gradient, which the stage before needs at once; and W, the weight
gradient, which only the optimizer needs. Split them, run I first, and run W in the idle time:

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 .. I2 W2 .. I3 W3      k = 1: memory of 1F1B, idle (p-1)(T_F + T_I - T_W)
    rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3            stage s is k*s weight gradients behind

With k = 2 there are 2(p-1-s) forwards before the first backward: idle (p-1)(T_F + T_I - 2 T_W) in a rank's own window,
for 2p-1 micro-batches alive. "Own window" because ranks start and end at different times: the next step must begin
without a global barrier. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.pipeline.plan.plan import F, I, Orders, W, every, schedule


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
