"""One action of a pipeline: what a rank does to one micro-batch at one stage, as a single integer.

A plan of 1,024 ranks and 4,096 micro-batches has eight million actions, so an action is not an object but a number:

    stage | micro-batch | kind          F(2, 0) is stage 2's forward of micro-batch 0 and prints as 2F0

Stage numbers are those of the model, 0 to S-1, whatever rank holds the stage. Kinds: F forward; I input gradient; W
weight gradient; B both as one action; RECOMPUTE a second forward before a backward; SEND_F, RECV_F an activation leaves
stage s or arrives at it; SEND_B, RECV_B a gradient likewise; REDUCE_GRAD the stage's gradients are complete. An item of
a rank's order is an action, or a pair of them that run at the same time: (1F4;2B1)OVERLAP_F_B. The grammar is the one
of torch.distributed.pipelining.
"""

import re
from typing import NamedTuple

from minidist.base.errors import UsageError

KINDS = ("F", "I", "W", "B", "RECOMPUTE", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD")
FORWARD, INPUT, WEIGHT, BACKWARD, RECOMPUTE, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD = range(len(KINDS))
COMPUTE = (FORWARD, INPUT, WEIGHT, BACKWARD, RECOMPUTE)

KIND_BITS, MICROBATCH_BITS = 4, 28
STEP = 1 << KIND_BITS  # from one micro-batch to the next
STAGE = 1 << KIND_BITS + MICROBATCH_BITS  # from one stage to the next

Item = int | tuple[int, int]


class Action(NamedTuple):
    """An action taken apart. `microbatch` is 0 and without meaning for REDUCE_GRAD."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + ("" if self.kind == "REDUCE_GRAD" else str(self.microbatch))


def pack(kind: int, stage: int, microbatch: int = 0) -> int:
    """The number of an action; `kind` is an index of KINDS."""
    return stage * STAGE + microbatch * STEP + kind


def F(stage: int, microbatch: int) -> int:
    """Forward."""
    return stage * STAGE + microbatch * STEP + FORWARD


def I(stage: int, microbatch: int) -> int:  # noqa: E743
    """Input gradient alone (Zero Bubble's paper calls it B)."""
    return stage * STAGE + microbatch * STEP + INPUT


def W(stage: int, microbatch: int) -> int:
    """Weight gradient alone."""
    return stage * STAGE + microbatch * STEP + WEIGHT


def B(stage: int, microbatch: int) -> int:
    """Full backward: input gradient, then weight gradient."""
    return stage * STAGE + microbatch * STEP + BACKWARD


def every(action: int, microbatches: int) -> range:
    """`action` for the next so many micro-batches: every(F(2, 0), 3) is 2F0 2F1 2F2, without making a list."""
    return range(action, action + microbatches * STEP, STEP)


def kind_of(action: int) -> int:
    """Index into KINDS."""
    return action % STEP


def stage_of(action: int) -> int:
    """Stage number in the model."""
    return action // STAGE


def microbatch_of(action: int) -> int:
    """Number of the micro-batch."""
    return action % STAGE // STEP


def unpack(action: int) -> Action:
    """Kind, stage and micro-batch of an action."""
    return Action(KINDS[action % STEP], action // STAGE, action % STAGE // STEP)


def parts(item: Item) -> tuple[int, ...]:
    """The actions of an item: itself, or the two that overlap."""
    return item if isinstance(item, tuple) else (item,)


def show(item: Item) -> str:
    """An item in the field's grammar."""
    if isinstance(item, tuple):
        return f"({show(item[0])};{show(item[1])})OVERLAP_F_B"
    kind = item % STEP
    if kind == REDUCE_GRAD:
        return f"{item // STAGE}REDUCE_GRAD"
    return f"{item // STAGE}{KINDS[kind]}{item % STAGE // STEP}"


_ACTION = re.compile(r"(\d+)(" + "|".join(sorted(KINDS, key=len, reverse=True)) + r")(\d*)")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def read(text: str) -> Item:
    """The item that `text` writes; UsageError that says what an action looks like."""
    overlap = _OVERLAP.fullmatch(text)
    if overlap:
        first, second = (read(part.strip()) for part in overlap.groups())
        kinds = {kind_of(part) for item in (first, second) for part in parts(item)}
        if (
            isinstance(first, tuple)
            or isinstance(second, tuple)
            or kinds not in ({FORWARD, BACKWARD}, {FORWARD, INPUT})
        ):
            raise UsageError(f"{text!r} must overlap one F with one B or I, as (1F4;2B1)OVERLAP_F_B does")
        return first, second
    match = _ACTION.fullmatch(text)
    if match is None or (match[3] == "") != (match[2] == "REDUCE_GRAD"):
        raise UsageError(
            f"{text!r} is not an action: write stage, kind, micro-batch, as in 2F0, 1I3, 0SEND_F1 or 2REDUCE_GRAD; the"
            f" kinds are {', '.join(KINDS)}"
        )
    if len(match[1]) > 8 or len(match[3]) > 8 or int(match[3] or 0) >= 1 << MICROBATCH_BITS:
        raise UsageError(f"{text!r} has a stage or a micro-batch number of more than eight digits; count both from 0")
    return pack(KINDS.index(match[2]), int(match[1]), int(match[3] or 0))
