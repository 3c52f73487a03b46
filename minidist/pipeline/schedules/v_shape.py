"""V-Min and V-Half: a third and a half of 1F1B's activations, because a rank's two chunks are alive in turn.

    rank 0   stage 0 ↓        stage 2p-1 ↑   loss
    rank 1   stage 1 ↓        stage 2p-2 ↑           what lives long on the way down lives briefly on the way up
    rank 2   stage 2 ↓ ────── stage 2p-3 ↑

A schedule is a building block, the four passes F, F, I, I of one micro-batch, that repeats every 6 units (F, I and W of
two chunks, 1 each). A chunk's activation lives from F to W, so the offsets between neighbouring ranks decide the
memory. On rank r, with δ for F down, F up, I down and I up, the lifetimes of both chunks add up to

    (p-1) (δ_F0 + δ_F1 + δ_I1 + δ_I0) + constant     if δ_F0 + δ_I0 = δ_F1 + δ_I1: the same on every rank

V-Min has offsets 1, 1, 1, 1: 4p/6 half-stage chunks, a = (p+4)//3 micro-batches of a rank's whole part. V-Half has 2,
1, 2, 1: 6p/6 chunks, a = (p+2)//2 micro-batches. (4, 2, 4, 2 makes 1F1B's p: that is ZB-V.) From m = p on, a rank is
idle for 6(p-a) - 1 units (1 unit on two ranks), about 4p and 3p, where 1F1B has 6(p-1). Fewer than a micro-batches
take 4p + 2m - 1 units. Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3. No
plan takes more units than that of the authors' program; V-Min takes fewer where p mod 3 is 2.

Proved by: tests/pipeline/test_v_shape.py, tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from collections import deque

from minidist.core.pipeline.plan import STAGE, STEP, F, I, Orders, W
from minidist.core.pipeline.schedules import schedule

INTERVAL = 6  # units after which the block of the next micro-batch starts: F, I and W of both chunks


@schedule("v-min", aliases=("v_min", "vmin"), chunks=2)
def v_min(p: int, m: int) -> Orders:
    """Return V-Min for any m: at most (p+4)//3 micro-batches alive."""
    if p <= 3:  # then V-Half has no more alive
        return v_half(p, m)
    pauses = ((2, 2, 2), (0, 0, 0), (0, 4, 0))[p % 3]
    return _shortest(_block(p, (1, 1, 1, 1), pauses), m, (p + 4) // 3)


@schedule("v-half", aliases=("v_half", "vhalf"), chunks=2)
def v_half(p: int, m: int) -> Orders:
    """Return V-Half for any m: at most (p+2)//2 micro-batches alive."""
    pauses = ((3, 3, 1), (0, 0, 1))[p % 2]
    return _shortest(_block(p, (2, 1, 2, 1), pauses), m, (p + 2) // 2)


def _block(p: int, offsets: tuple[int, ...], pauses: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return for each rank when its F down, F up, I up and I down of the first micro-batch start.

    offsets: units from a rank to the next one, for each of the four. pauses: units in which the micro-batch waits at a
    turn: on the last rank, at the loss, on the last rank again. They keep the passes of a rank on different units.
    """
    turns, start = [], 0
    for offset, pause in zip(offsets, (*pauses, 0), strict=True):
        turns.append([start + offset * i for i in range(p)])
        start = turns[-1][-1] + 1 + pause
    down, up, back, home = turns
    return list(zip(down, reversed(up), back, reversed(home), strict=True))


def _shortest(starts: list[tuple[int, ...]], m: int, alive: int) -> Orders:
    """Return the orders that take the fewest units: of passes in the block's order, or one or p - 1 passes ahead."""
    few = min(m, 2 * len(starts))  # more micro-batches take 6 units each, whatever the order
    ahead = min((1, 2, len(starts)), key=lambda ahead: _squeeze(starts, few, alive, ahead)[0])
    return _squeeze(starts, m, alive, ahead)[1]


def _squeeze(starts: list[tuple[int, ...]], m: int, alive: int, ahead: int) -> tuple[int, Orders]:
    """Return units and orders of m repeated blocks, each pass as early as it can be and W where a rank would wait.

    alive: micro-batches of a rank's whole part of the model (two chunks) that it keeps at most, each from F to W.
    ahead: passes of a rank among which it takes the first that can start.
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

    # Squeeze: unit after unit, each rank runs a pass if one can start, else its oldest weight gradient.
    orders: list[list[int]] = [[] for _ in range(p)]
    waiting: list[deque[int]] = [deque() for _ in range(p)]
    room, done, units = [2 * alive] * p, set[int](), 0
    while any(passes) or any(waiting):
        ran = []
        for r in range(p):
            action = _take(passes[r], ahead, room[r], 2 * p - 1, done)
            if action is not None:
                ran.append(action)
                if action % STEP == F(0, 0):
                    room[r] -= 1
                else:
                    waiting[r].append(action - I(0, 0) + W(0, 0))
            elif waiting[r]:
                action = waiting[r].popleft()
                room[r] += 1
            else:
                continue
            orders[r].append(action)
        done.update(ran)  # what ran in this unit has ended in the next one
        units += 1
    return units, orders


def _take(passes: deque[int], ahead: int, room: int, last: int, done: set[int]) -> int | None:
    """Remove and return the first of the next passes whose input is there; a forward also needs room."""
    for i in range(min(ahead, len(passes))):
        action = passes[i]
        stage = action // STAGE
        if action % STEP == F(0, 0):
            ready = room > 0 and (stage == 0 or action - STAGE in done)
            room -= 1  # a later forward leaves room for this one, or ranks could wait for each other
        else:
            ready = (action + STAGE if stage < last else action - I(0, 0)) in done
        if ready:
            del passes[i]
            return action
    return None
