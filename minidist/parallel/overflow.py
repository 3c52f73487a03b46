"""Agree on whether a gradient overflowed on any rank, because all ranks must make a step or skip it together.

    rank 0   shard is finite  ──▶ step, all-gather of the parameters ... waits for rank 1
    rank 1   shard has an inf ──▶ skips the step ...                     has gone on: a deadlock, or mixed messages

A rank sees only its own shard, stage or tile. So each says with one byte whether it saw an overflow, and the maximum
over the ranks of all axes together decides: log2 n messages of one byte from each rank, before any rank steps.

Source: Micikevicius et al., Mixed precision training, ICLR 2018, section 3.2 (skip the step on an overflow).
Proved by: tests/parallel/test_mixed_precision.py
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minidist.base.half import all_finite
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.optim import DynamicLossScaler

new_purpose("overflow")


def agree_on_overflow(comm: Comm, overflow: bool, equal: str = "") -> bool:
    """Return True on every rank of `comm` when `overflow` is True on one of them.

    comm: all ranks that step together, whatever the axes. equal: what every rank must pass equal, see `all_reduce`.

    An all-reduce (maximum) of one byte by recursive doubling, purpose `overflow`: log2 n bytes from each of n ranks
    when n is a power of two (else see `collectives/recursive_doubling.py`).
    """
    # One byte; the maximum is 1 when any rank saw an overflow.
    flag = np.array([overflow], np.uint8)
    with purpose("overflow"):
        all_reduce(comm, flag, "max", algorithm="recursive_doubling", equal=equal)
    return bool(flag[0])


def scaled_step(
    comm: Comm,
    scaler: DynamicLossScaler,
    optimizer: Any,
    gradients: Iterable[Array | None],
    *,
    clip: Callable[[], Any] | None = None,
) -> bool:
    """End a step with a scaled loss: agree on overflow, unscale, clip, step, update the scale.

    Returns True when the step was made. optimizer: anything that has `grad_scale` and `step()` (an optimizer, a
    `ZeroOptimizer`). gradients: the reduced ones that this rank holds, still scaled. clip: called when the step is
    made, between unscaling and the step.
    """
    gradients = list(gradients)
    if gradients and all(gradient is None for gradient in gradients):
        raise UsageError(
            f"rank {comm.rank}: scaled_step got {len(gradients)} gradients, all of them None, so no overflow would be"
            " seen; call backward before it, and with ZeRO or fully_shard pass the `grad` of this rank's shards"
        )

    # Every rank must call the all-reduce, also one whose own gradients are finite.
    finite = all(gradient is None or all_finite(gradient) for gradient in gradients)
    overflow = agree_on_overflow(comm, not finite, f"loss_scale {scaler.scale:g}")

    # The step itself unscales, so that half-precision gradients are not rounded once more.
    if not overflow:
        optimizer.grad_scale = 1 / scaler.scale
        if clip is not None:
            clip()
        optimizer.step()

    # Every rank updates its scale in the same way, so the scales stay equal without a message.
    scaler.update(overflow)
    return not overflow
