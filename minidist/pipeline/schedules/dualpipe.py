"""DualPipe and DualPipeV: two streams in opposite directions; one computes forward while the other's backward sends.

    direction 0   rank 0 → 1 → 2 → 3       micro-batches 0 .. m/2-1         every rank holds stage r for direction 0
    direction 1   rank 3 → 2 → 1 → 0       micro-batches m/2 .. m-1         and stage p-1-r for direction 1

The rank's near direction is phase 0, the other phase 1. F0&B1 is one overlapped action. Every parameter exists
twice. DualPipeV folds the second direction into a second chunk (stages r and 2p-1-r), so each parameter exists once.
Idle (P/2-1)(T_F&B + T_B - 3 T_W), P = p for DualPipe and 2p for DualPipeV; peak P+1 micro-batches (chunks). Sources:
DeepSeek-V3, arXiv:2412.19437; the DualPipe repository's README, whose steps 1 to 8 are those of the code.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from collections import deque

from minidist.core.pipeline.plan import B, F, I, Item, Orders, W
from minidist.pipeline.schedules.schedule import schedule


def _even(p: int, m: int, v: int) -> str | None:
    if p % 2:
        return f"the number of stages must be even; take {p + 1}"
    if m % 2 or m < 2 * p:
        return f"it needs an even number of at least {2 * p}"
    return None


def _twice_p(p: int, m: int, v: int) -> str | None:
    return None if m >= 2 * p else f"it needs at least {2 * p}"


@schedule("dualpipe", aliases=("ScheduleDualPipe",), takes=_even)
def dualpipe(p: int, m: int) -> Orders:
    """Return DualPipe for an even p and an even m of at least 2p."""
    orders, half = [], p // 2
    for r in range(p):
        h, near = min(r, p - 1 - r), int(r >= half)
        streams = [(r, 0), (p - 1 - r, m // 2)]  # (stage, first micro-batch) of direction 0 and 1
        orders.append(_rank_order(streams[near], streams[1 - near], half - h - 1, h, m // 2 - p + h + 1, h == half - 1))
    return orders


@schedule("dualpipev", aliases=("ScheduleDualPipeV", "dualpipe-v"), chunks=2, takes=_twice_p)
def dualpipev(p: int, m: int) -> Orders:
    """Return DualPipeV for an m of at least 2p."""
    return [_rank_order((r, 0), (2 * p - 1 - r, 0), p - r - 1, r, m - 2 * p + r + 1, r == p - 1) for r in range(p)]


def _rank_order(
    near: tuple[int, int], far: tuple[int, int], outer: int, inner: int, pairs: int, middle: bool
) -> list[Item]:
    """Return a rank's order.

    near, far: (stage, first micro-batch) of phases 0 and 1. outer: ranks between this one and the middle; inner:
    between this one and the end. pairs: of step 4; middle: the first of them does not overlap.
    """
    streams = (near, far)
    forwards, backwards = [0, 0], [0, 0]
    waiting: deque[int] = deque()  # weight gradients that were put off; the oldest runs first
    order: list[Item] = []

    def forward(phase: int) -> int:
        stage, first = streams[phase]
        forwards[phase] += 1
        return F(stage, first + forwards[phase] - 1)

    def backward(phase: int, split: bool = False) -> int:
        stage, first = streams[phase]
        backwards[phase] += 1
        i = first + backwards[phase] - 1
        if split:
            waiting.append(W(stage, i))
            return I(stage, i)
        return B(stage, i)

    # Step 1, warm-up: forwards of the near direction, until the far one arrives.
    order += [forward(0) for _ in range(2 * outer)]
    # Step 2, warm-up: forwards of both.
    for _ in range(inner + 1):
        order += [forward(0), forward(1)]
    # Step 3, warm-up: the first backwards of the far direction; W fills the time.
    for _ in range(outer):
        order += [backward(1, True), waiting.popleft(), forward(1)]
    # Step 4, steady state: the forward of one direction together with the backward of the other.
    for i in range(pairs):
        if i == 0 and middle:
            order += [forward(0), backward(1)]
        else:
            order.append((forward(0), backward(1)))
        order.append((forward(1), backward(0)))
    # Step 5, cool-down: the last forwards of the far direction.
    for _ in range(outer):
        order += [backward(1), (forward(1), backward(0))]
    # Step 6, cool-down: backwards of both; the second half puts its weight gradients off.
    turn = (inner + 1) // 2
    for i in range(inner + 1):
        order += [backward(1, i > turn or (i == turn and inner % 2 == 1)), backward(0, i >= turn)]
    # Step 7, cool-down: the input gradients that other ranks wait for, with W in between.
    for _ in range(outer):
        order += [waiting.popleft(), backward(0, True)]
    # Step 8: the weight gradients that are left.
    order += waiting
    return order
