"""The squared error, and what the losses refuse.

Proved by: tests/autograd/test_fused.py, tests/autograd/test_refusals.py
"""

from typing import Any

from minidist.core.autograd.errors import AutogradError
from minidist.core.autograd.tensor import Tensor, named_mean
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError, quoted
from minidist.core.base.limits import check_number


def mse_loss(prediction: Tensor, target: Any, divisor: float | None = None) -> Tensor:
    """Sum of squared differences divided by `divisor` (None: the number of elements)."""
    difference = prediction - target
    total = (difference * difference).sum()
    if divisor is None:
        return named_mean(total * (1 / float(prediction.size or "nan")), f"{prediction.size} elements")
    return total * (1 / checked_divisor("mse_loss", divisor))


def check_logits(logits: Any) -> None:
    """Raise AutogradError unless the logits are a Tensor."""
    if not isinstance(logits, Tensor):
        raise AutogradError(
            f"cross_entropy: the logits are a value of type {type(logits).__name__}, through which no gradient gets;"
            " pass the Tensor that the model computes (Tensor(logits) where no gradient is wanted)"
        )


def check_integers(name: str, targets: xp.Array) -> None:
    """Raise AutogradError unless the targets are integers."""
    if targets.dtype.kind not in "iu":
        raise AutogradError(f"{name}: targets must be integers, not {targets.dtype}")


def check_range(name: str, targets: xp.Array, counted: xp.Array, classes: int) -> None:
    """Raise AutogradError for a target that counts and is no class."""
    wrong = targets[counted & ((targets < 0) | (targets >= classes))]
    if wrong.size:
        raise AutogradError(f"{name}: target {int(wrong[0])} is out of range: classes are 0..{classes - 1}")


def checked_divisor(name: str, divisor: Any) -> float:
    """Return a loss's divisor as a float; raise UsageError for 0, a negative, infinite or NaN one, and for True."""
    try:
        number = divisor.item() if xp.is_array(divisor) and divisor.size == 1 else divisor
        return check_number("divisor", number, above=0)
    except UsageError:
        raise UsageError(
            f"{name}: divisor={quoted(divisor)}; give the number of rows (tokens) that all ranks and micro-batches"
            " count in this step, a finite number above 0"
        ) from None
