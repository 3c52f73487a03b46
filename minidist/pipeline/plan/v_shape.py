"""V-Min and V-Half: a third and a half of 1F1B's activations, because a rank's two chunks are alive in turn.

    rank 0   stage 0 ↓        stage 2p-1 ↑   loss
    rank 1   stage 1 ↓        stage 2p-2 ↑           what lives long on the way down lives briefly on the way up
    rank 2   stage 2 ↓ ────── stage 2p-3 ↑

A schedule is a building block, the four passes F, F, I, I of one micro-batch, that repeats every 6 units (F, I and W of
two chunks, 1 each). A chunk's activation lives from F to W, so the offsets between neighbouring ranks decide the
memory. On rank r, with δ for F down, F up, I down and I up, the lifetimes of both chunks add up to

    (p-1) (δ_F0 + δ_F1 + δ_I1 + δ_I0) + constant     if δ_F0 + δ_I0 = δ_F1 + δ_I1: the same on every rank

V-Min has offsets 1, 1, 1, 1: 4p/6 half-stage chunks, (p+4)//3 micro-batches of a rank's whole part. V-Half has 2, 1, 2,
1: 6p/6 chunks, (p+2)//2 micro-batches. (4, 2, 4, 2 makes 1F1B's p: that is ZB-V.) Idle, in units of a chunk's F, is
about 4p and 3p, where 1F1B has 6(p-1). Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024,
section 3; the gaps between the passes are those of the authors' code.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from collections import deque

from minidist.pipeline.plan.action import STAGE, STEP, F, I, W
from minidist.pipeline.plan.registry import Orders, schedule

INTERVAL = 6  # units after which the block of the next micro-batch starts: F, I and W of both chunks


@schedule("v-min", aliases=("v_min", "vmin"), chunks=2)
def v_min(p: int, m: int) -> Orders:
    """Return V-Min for any m: at most (p+4)//3 micro-batches alive."""
    gap = 2 if p % 3 == 0 else 0  # without it F down and I down would fall on the same unit
    starts = [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r) for r in range(p)]
    return _squeeze(starts, m, (p + 4) // 3)


@schedule("v-half", aliases=("v_half", "vhalf"), chunks=2)
def v_half(p: int, m: int) -> Orders:
    """Return V-Half for any m: at most (p+2)//2 micro-batches alive."""
    gap = 3 if p % 2 == 0 else 0
    starts = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r) for r in range(p)]
    return _squeeze(starts, m, (p + 2) // 2)


def _squeeze(starts: list[tuple[int, int, int, int]], m: int, alive: int) -> Orders:
    """Return the orders of m repeated blocks, each action as early as it can be and W where a rank would wait.

    starts: for each rank when its F down, F up, I up and I down of the first micro-batch start. alive: micro-batches of
    a rank's whole part of the model (two chunks) that it keeps at most, each from F to W.
    """
    p = len(starts)

    # Repeat: the passes of a rank in the order of the building blocks; no two fall on the same unit.
    passes: list[deque[int]] = []
    for r, block in enumerate(starts):
        first = (F(r, 0), F(2 * p - 1 - r, 0), I(2 * p - 1 - r, 0), I(r, 0))
        repeated = [
            (t + INTERVAL * i, action + i * STEP) for t, action in zip(block, first, strict=True) for i in range(m)
        ]
        passes.append(deque(action for _, action in sorted(repeated)))

    # Squeeze: unit after unit, each rank runs its next pass if it can, else its oldest weight gradient.
    orders: list[list[int]] = [[] for _ in range(p)]
    waiting: list[deque[int]] = [deque() for _ in range(p)]
    held, done = [0] * p, set[int]()
    while any(passes) or any(waiting):
        ran = []
        for r in range(p):
            if passes[r] and _ready(passes[r][0], done, 2 * p, held[r] < 2 * alive):
                action = passes[r].popleft()
                ran.append(action)
            elif waiting[r]:
                action = waiting[r].popleft()
                held[r] -= 1
            else:
                continue
            orders[r].append(action)
            if action % STEP == F(0, 0):
                held[r] += 1
            elif action % STEP == I(0, 0):
                waiting[r].append(action - I(0, 0) + W(0, 0))
        done.update(ran)  # what ran in this unit has ended in the next one
    return orders


def _ready(action: int, done: set[int], stages: int, room: bool) -> bool:
    """Whether a pass can start: its neighbours' passes are done, and a forward has room for its activations."""
    stage = action // STAGE
    if action % STEP == F(0, 0):
        return room and (stage == 0 or action - STAGE in done)
    return stage == stages - 1 or action + STAGE in done
