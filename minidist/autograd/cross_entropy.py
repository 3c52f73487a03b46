"""Softmax and cross-entropy as one node: the loss of a classifier or language model.

Strategies sum: a rank divides by the *global* number of tokens (`divisor`), so that the sum over ranks and
micro-batches is the loss of the whole batch, also when shards or masks are uneven.
"""

from typing import Any

from minidist.autograd.errors import AutogradError, ShapeError
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp


def cross_entropy(logits: Tensor, targets: Any, divisor: float | None = None, ignore_index: int = -100) -> Tensor:
    """Sum over rows of -log softmax(logits)[target], divided by `divisor`; a tensor of shape ().

    logits (..., classes); targets (...), integers in [0, classes), or `ignore_index` for a row that does not count.
    divisor: None is the number of rows that count (the mean; nan when there are none). Pass the global number of
    tokens of the step when this batch is one of several.
    """
    targets = xp.as_array(targets.data if isinstance(targets, Tensor) else targets)
    if targets.shape != logits.shape[:-1] or logits.ndim < 1:
        raise ShapeError(f"cross_entropy: targets of shape {targets.shape} for logits of shape {logits.shape}")
    if targets.dtype.kind not in "iu":
        raise AutogradError(f"cross_entropy: targets must be integers, not {targets.dtype}")
    classes = logits.shape[-1]
    flat = targets.reshape(-1)
    scores = logits.data.reshape(flat.size, classes)
    counted = None
    if flat.size and (flat.min() < 0 or flat.max() >= classes):
        counted = flat != ignore_index
        wrong = flat[counted & ((flat < 0) | (flat >= classes))]
        if wrong.size:
            raise AutogradError(f"cross_entropy: target {int(wrong[0])} is no class; classes are 0..{classes - 1}")
        flat = xp.where(counted, flat, 0)
    if divisor is None:
        count = flat.size if counted is None else int(counted.sum())
        divisor = count if count else float("nan")
    divisor = float(divisor)  # a NumPy float64 would promote the loss
    rows = xp.arange(flat.size)
    gradient = scores - scores.max(axis=-1, keepdims=True, initial=-xp.inf)
    picked = gradient[rows, flat]
    xp.exp(gradient, out=gradient)
    totals = gradient @ xp.ones(classes, gradient.dtype, gradient)
    losses = xp.log(totals) - picked
    if counted is not None:
        losses *= counted
    factor = xp.reciprocal(totals)
    factor *= 1 / divisor
    gradient *= factor[:, None]  # softmax / divisor
    gradient[rows, flat] -= 1 / divisor
    if counted is not None:
        gradient *= counted[:, None]
    shape = logits.shape

    def grad(g: xp.Array) -> xp.Array:
        result = gradient.reshape(shape)
        result *= g  # in place: this node runs once
        return result

    return record("cross_entropy", losses.sum() / divisor, ((logits, grad),), flops=5 * scores.size, saved=(gradient,))


def mse_loss(prediction: Tensor, target: Any, divisor: float | None = None) -> Tensor:
    """Sum of squared differences divided by `divisor` (None: the number of elements)."""
    difference = prediction - target
    return (difference * difference).sum() * (1 / float(divisor or prediction.size or "nan"))
