"""Did a gradient overflow anywhere? All ranks must give the same answer, or they part.

    rank 0   shard is finite  ──▶ step, all-gather of the parameters ... waits for rank 1
    rank 1   shard has an inf ──▶ skips the step ...                     has gone on: a deadlock, or worse, mixed messages

A rank sees its own shard, stage or tile. So each says with one byte whether it saw an overflow, and the largest answer,
over the ranks of all axes together, is everybody's: log2 n messages of one byte from each, and everybody knows before
anybody steps.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minidist.base.arrays import Array
from minidist.base.half import all_finite
from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.comm import Comm
from minidist.optim import DynamicLossScaler


def agree_on_overflow(comm: Comm, overflow: bool) -> bool:
    """True on every rank of `comm` when it is True on one. comm: all ranks that step together, whatever the axes.

    An all-reduce (maximum) of one byte by recursive doubling, purpose `overflow`: log2 n bytes from each of n ranks
    when n is a power of two (else see `collectives/recursive_doubling.py`).
    """
    flag = np.array([overflow], np.uint8)
    with purpose("overflow"):
        all_reduce(comm, flag, "max", algorithm="recursive_doubling")
    return bool(flag[0])


def scaled_step(
    comm: Comm,
    scaler: DynamicLossScaler,
    optimizer: Any,
    gradients: Iterable[Array | None],
    *,
    clip: Callable[[], Any] | None = None,
) -> bool:
    """The end of a step with a scaled loss: overflow agreed on, unscale, clip, step, update the scale. Was the step
    made?

    optimizer: whatever has `grad_scale` and `step()` (an optimizer, a `ZeroOptimizer`). gradients: the reduced ones
    that this rank holds, still scaled. clip: called when the step is made, between unscaling and the step.
    """
    overflow = agree_on_overflow(comm, not all(gradient is None or all_finite(gradient) for gradient in gradients))
    if not overflow:
        optimizer.grad_scale = 1 / scaler.scale
        if clip is not None:
            clip()
        optimizer.step()
    scaler.update(overflow)
    return not overflow
