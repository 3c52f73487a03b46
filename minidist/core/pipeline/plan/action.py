"""One action of a pipeline: what a rank does to one micro-batch at one stage, as a single integer.

A plan of 1,024 ranks and 4,096 micro-batches has eight million actions, so an action is stored as a number:

    stage | micro-batch | kind          F(2, 0) is stage 2's forward of micro-batch 0 and prints as 2F0

`Action` is that number with names for its three parts. Stage numbers are those of the model, 0 to S-1, whatever rank
holds the stage. Kinds: F forward; I input gradient; W weight gradient; B both as one action; RECOMPUTE a second forward
before a backward; SEND_F, RECV_F an activation leaves stage s or arrives at it; SEND_B, RECV_B a gradient likewise;
REDUCE_GRAD the stage's gradients are complete. An item of a rank's order is one action, or a pair of actions that
overlap: (1F4;2B1)OVERLAP_F_B. The grammar is the one of torch.distributed.pipelining.

Proved by: tests/pipeline/test_plans.py
"""

KINDS = ("F", "I", "W", "B", "RECOMPUTE", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD")
FORWARD, INPUT, WEIGHT, BACKWARD, RECOMPUTE, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD = range(len(KINDS))
COMPUTE = KINDS[: RECOMPUTE + 1]
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

KIND_BITS, MICROBATCH_BITS = 4, 28
STEP = 1 << KIND_BITS  # from one micro-batch to the next
STAGE = 1 << KIND_BITS + MICROBATCH_BITS  # from one stage to the next

Item = int | tuple[int, int]


class Action(int):
    """An action's number with names for its parts: `Action(F(2, 0)).stage` is 2.

    It equals, and hashes as, the plain number. `microbatch` is 0 and without meaning for REDUCE_GRAD.
    """

    __slots__ = ()

    @classmethod
    def of(cls, kind: str, stage: int, microbatch: int = 0) -> "Action":
        """Return the action of that kind, stage and micro-batch."""
        return cls(stage * STAGE + microbatch * STEP + NUMBERS[kind])

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return KINDS[self % STEP]

    @property
    def stage(self) -> int:
        """Stage number in the model."""
        return self // STAGE

    @property
    def microbatch(self) -> int:
        """Number of the micro-batch."""
        return self % STAGE // STEP

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__


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
    """Return `action` for the next micro-batches, not as a list: every(F(2, 0), 3) is 2F0 2F1 2F2."""
    return range(action, action + microbatches * STEP, STEP)


def actions_of(item: Item) -> tuple[Action, ...]:
    """Return the actions of an item: itself, or the two that overlap."""
    return (Action(item[0]), Action(item[1])) if isinstance(item, tuple) else (Action(item),)


def show(item: Item) -> str:
    """Return an item in the field's grammar."""
    if isinstance(item, tuple):
        return f"({show(item[0])};{show(item[1])})OVERLAP_F_B"
    kind = item % STEP
    if kind == REDUCE_GRAD:
        return f"{item // STAGE}REDUCE_GRAD"
    return f"{item // STAGE}{KINDS[kind]}{item % STAGE // STEP}"
