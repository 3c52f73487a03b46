"""The softmax, and softmax and cross-entropy as one node: the loss of a classifier or language model.

    loss = log(sum_j exp(z_j)) - z_target     its gradient: softmax(z), minus 1 at the target

Proved by: tests/autograd/test_fused.py, tests/autograd/test_operations.py
"""

from collections.abc import Callable
from functools import partial
from math import inf, prod
from operator import imul
from typing import Any

from minidist.core.autograd.operators import axes_of, operand
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import ShapeError

Reduce = Callable[[xp.Array, str], Any]  # (array, "max" or "sum"): combine the array's numbers over the ranks, in place


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum exp(x) along `axis`, shifted by the maximum so that nothing overflows."""
    axes_of("softmax", x, axis)
    if x.size == 0:
        return x * 1.0
    x = operand(x)
    values = x.data
    data = xp.exp(values - values.max(axis=axis, keepdims=True))
    data /= data.sum(axis=axis, keepdims=True)
    result = x.save(data)
    del data

    def grad(g: xp.Array) -> xp.Array:
        y = result.data
        return y * (g - (g * y).sum(axis=axis, keepdims=True))

    return record("softmax", result.stored, ((x, grad),), cost=5 * x.size)


def cross_entropy(logits: Tensor, targets: Any, divisor: float | None = None, ignore_index: int = -100) -> Tensor:
    """Sum over rows of -log softmax(logits)[target], divided by `divisor`; a tensor of shape ().

    logits (..., classes); targets (...), integers in [0, classes), or `ignore_index` for a row that does not count; the
    latter may be a class.
    divisor: None is the number of rows that count (the mean; nan with a gradient of zero when there are none). Pass the
    global number of tokens of the step when this batch is one of several: ranks that average means need as many rows.
    """
    if not isinstance(logits, Tensor):
        hooks.operation_checks().refuse_logits(logits)
    flat, counted = checked_targets("cross_entropy", logits, targets, ignore_index)
    mean_over = ""
    if divisor.__class__ is not float or not 0 < divisor < inf:
        divisor, mean_over = divisor_and_rows("cross_entropy", divisor, flat, counted)
    result = softmax_loss("cross_entropy", logits, (xp.arange(flat.size), flat), counted, divisor)
    return hooks.named_mean(result, mean_over) if mean_over else result


def softmax_loss(
    name: str,
    logits: Tensor,
    own: tuple[xp.Array, xp.Array],
    counted: xp.Array | None,
    divisor: float,
    words: int | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """The sum over rows of log(sum of exp(logits)) - the target's logit, divided by `divisor`; a tensor of shape ().

    logits (..., classes), of all classes or of a rank's part. own: the rows whose target is in it, and its column.
    counted: which rows count, None for all. For a part of the classes, words is the number of its columns that are
    not padding, and reduce combines arrays over the ranks.
    """
    shape, classes = logits.shape, logits.shape[-1]
    if logits.data.itemsize == 2:
        logits = operand(logits)  # half precision computes in float32
    scores = logits.data.reshape(prod(shape[:-1]), classes)
    part = 1 / divisor if divisor == divisor else 0.0  # the mean over no rows is nan, and its gradient is zero

    kernels = None if type(scores) is xp.ndarray else xp.kernels_of(scores)
    if scores.size and reduce is None and not logits.half and kernels is not None:
        total, gradient = kernels.softmax_loss(scores, own[1], counted, part)
        gradient = gradient.reshape(shape)
        edges = ((logits, partial(imul, gradient)),)
        return record(name, total / divisor, edges, cost=5 * scores.size, saved=(gradient,))

    # The largest logit of a row is taken from all others, so that nothing overflows.
    if reduce is None:
        largest = scores.max(axis=-1, keepdims=True)
        exponentials = scores - largest
        picked = exponentials[own]
        xp.exp(exponentials, out=exponentials)
        totals = exponentials @ xp.constant(classes, 1, scores)
    else:
        largest, exponentials, picked, totals = _over_ranks(scores, own, words, reduce)
    losses = xp.log(totals) - picked
    if counted is not None:
        losses *= counted
    loss = losses.sum() / divisor

    def gradient_from(exponentials: xp.Array) -> xp.Array:
        """softmax / divisor, less 1 / divisor at the target; in place."""
        exponentials *= (xp.reciprocal(totals) * part)[:, None]
        exponentials[own] -= part
        if counted is not None:
            exponentials *= counted[:, None]
        return exponentials.reshape(shape)

    if logits.half:
        # Half precision does not hold 1 / divisor before the loss scale: keep the logits, and compute it once more.
        grad_again = hooks.precision().loss_gradient(logits, largest, words, gradient_from)
        return record(name, loss, ((logits, grad_again),), cost=5 * scores.size, saved=(largest, totals))

    # The exponentials are not needed any more: they become the gradient now, and backward only scales it, in place.
    gradient = gradient_from(exponentials)
    return record(name, loss, ((logits, partial(imul, gradient)),), cost=5 * scores.size, saved=(gradient,))


def _over_ranks(
    scores: xp.Array, own: tuple[xp.Array, xp.Array], words: int | None, reduce: Reduce
) -> tuple[xp.Array, xp.Array, xp.Array, xp.Array]:
    """Return the numbers of `softmax_loss` where each rank has a part of the classes; of exponentials its own part."""
    # [1] The largest logit; a rank that has only padding contributes minus infinity.
    largest = xp.full((len(scores), 1), -inf, scores.dtype, scores)
    if words != 0:
        largest = scores[:, :words].max(axis=-1, keepdims=True)
    reduce(largest, "max")
    exponentials = scores - largest
    exponentials[:, words:] = -inf  # the padding

    # [2] The target's logit, less the largest. A rank without the target adds zero.
    picked = xp.zeros(len(scores), scores.dtype, scores)
    picked[own[0]] = exponentials[own]
    reduce(picked, "sum")

    # [3] The sum of the exponentials; each rank adds those of its classes.
    xp.exp(exponentials, out=exponentials)
    totals = exponentials @ xp.constant(scores.shape[1], 1, scores)
    reduce(totals, "sum")
    return largest, exponentials, picked, totals


def divisor_and_rows(name: str, divisor: float | None, flat: xp.Array, counted: xp.Array | None) -> tuple[float, str]:
    """Return what a loss's sum is divided by, and of a mean the number of its rows, in words. counted: None is all."""
    if divisor is None:
        count = flat.size if counted is None else int(counted.sum())
        return count or float("nan"), f"{count} rows"
    hooks.operation_checks().check_divisor(name, divisor)
    return float(xp.as_array(divisor).item()), ""  # a NumPy float64 would promote the loss


def checked_targets(name: str, logits: Tensor, targets: Any, ignore_index: int) -> tuple[xp.Array, xp.Array | None]:
    """Return a loss's targets, one per row of the logits, and which rows count (None: all); errors for wrong ones.

    Rows with ignore_index have class 0, so that it can be looked up; their losses have to be multiplied by zero.
    """
    targets = xp.as_array(targets.data if isinstance(targets, Tensor) else targets)
    if targets.shape != logits.shape[:-1] or not logits.shape:
        raise ShapeError(f"{name}: targets of shape {targets.shape} for logits of shape {logits.shape}")
    if targets.dtype.kind not in "iu":
        hooks.operation_checks().refuse_dtype(name, targets)
    classes, flat = logits.shape[-1], targets.reshape(-1)

    # Without a sign, a negative number is a large one.
    counted = None
    inside = 0 <= ignore_index < classes  # the id of a padding token may be a class itself
    if flat.size and (inside or flat.view(flat.dtype.str.replace("i", "u")).max() >= classes):
        counted = flat != ignore_index
        hooks.operation_checks().check_range(name, flat, counted, classes)
        flat = xp.where(counted, flat, 0)
    return flat, counted
