"""The loss of a step: the micro-batches' losses of all ranks, added in their global order.

Floating-point addition is not associative, so a sum has the same digits everywhere only if every rank adds the same
numbers in the same order. That is why losses are gathered and added, and not all-reduced.

Proved by: tests/equality/test_equality.py, tests/train/test_evaluate.py
"""

from collections.abc import Iterable

import numpy as np

from minidist.core.base.errors import MinidistError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm


class NonFiniteError(MinidistError):
    """The loss became NaN or infinite."""

    exit_code = 2


def ordered_sum(values: Iterable[float]) -> float:
    """Return ((a + b) + c) + ...; the bits of Python's `sum`, which compensates since 3.12, depend on its version."""
    total = 0.0
    for value in values:
        total += value
    return total


def global_loss(comm: Comm, local: list[float]) -> float:
    """Return the sum of the losses of all ranks' micro-batches, with the same digits on every rank of `comm`.

    Sends 8 B per micro-batch to every other rank (purpose metrics).
    """
    with purpose("metrics"):
        losses = all_gather(comm, np.array(local, dtype=np.float64))
    return ordered_sum(losses.tolist())
