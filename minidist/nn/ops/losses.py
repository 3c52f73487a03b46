"""The squared error.

Proved by: tests/autograd/test_fused.py
"""

from typing import Any

from minidist.core.autograd.tensor import Tensor
from minidist.core.base import hooks
from minidist.nn.ops.functions import sub
from minidist.nn.ops.refusals import check_divisor


def mse_loss(prediction: Tensor, target: Any, divisor: float | None = None) -> Tensor:
    """Sum of squared differences divided by `divisor` (None: the number of elements)."""
    difference = sub(prediction, target)
    total = (difference * difference).sum()
    if divisor is None:
        return hooks.named_mean(total * (1 / float(prediction.size or "nan")), f"{prediction.size} elements")
    return total * (1 / check_divisor("mse_loss", divisor))
