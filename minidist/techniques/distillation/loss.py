"""Knowledge distillation as one node: a student learns from labels, and from a teacher's probabilities.

    loss = (1 - a) * cross-entropy of the labels  +  a * T^2 * KL(p || q),    p = softmax(teacher's logits / T)
                                                                              q = softmax(student's logits / T)

A temperature T above 1 shows how the teacher ranks the wrong classes. The gradient of the second term falls with
1 / T^2, so it is multiplied by T^2, and a means the same at every temperature. With z the student's logits, the
gradient of a row is

    d loss / d z = (1 - a) * (softmax(z) - onehot)  +  a * T * (q - p)

Source: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015 (arXiv:1503.02531), section 2.
Proved by: tests/techniques/test_distillation_loss.py
"""

from functools import partial
from math import inf
from operator import imul
from typing import Any

from minidist.base.limits import check_number
from minidist.core.autograd.operators import operand
from minidist.core.autograd.ops.cross_entropy import checked_targets, divisor_and_rows
from minidist.core.autograd.tensor import Tensor, named_mean, record
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import is_half, upcast
from minidist.core.base.errors import AutogradError, ShapeError, UsageError, quoted


def distillation_loss(
    logits: Tensor,
    targets: Any,
    teacher_logits: Any,
    temperature: float = 2.0,
    weight: float = 0.5,
    divisor: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Sum over rows of the two terms above, weighted 1 - weight and weight, divided by `divisor`; shape ().

    logits, teacher_logits (..., classes); targets, divisor, ignore_index: as in `cross_entropy`, for both terms. The
    teacher gets no gradient: its logits are an array, or a tensor that was computed under `no_grad`, else
    AutogradError. They are converted to the dtype in which the student's are computed with.
    """
    temperature, weight = check_number("temperature", temperature, above=0), check_number("weight", weight)
    if weight > 1:
        raise UsageError(f"weight={quoted(weight)}; it must be from 0 (labels alone) to 1 (the teacher alone)")
    flat, counted = checked_targets("distillation_loss", logits, targets, ignore_index)
    shape, classes = logits.shape, logits.shape[-1]
    divisor, mean_over = divisor_and_rows("distillation_loss", divisor, flat, counted)

    # In float32, or in the student's float64. A gradient to the teacher would be lost without an error.
    student = operand(logits)
    scores = student.data.reshape(flat.size, classes)
    of_teacher = teacher_rows(teacher_logits, shape).reshape(flat.size, classes).astype(scores.dtype, copy=False)

    # Logarithms of softmax, shifted by the largest score, so that nothing overflows and log never meets a zero.
    log_hard = log_softmax(scores)
    log_q, log_p = log_softmax(scores / temperature), log_softmax(of_teacher / temperature)
    p, rows = xp.exp(log_p), xp.arange(flat.size)
    # A class that the teacher excludes (a score of -inf) contributes 0 times a finite number.
    soft = (p * (xp.maximum(log_p, -1e30) - log_q)).sum(axis=-1)
    losses = (weight * temperature**2) * soft - (1 - weight) * log_hard[rows, flat]

    of_gradient = divisor if divisor == divisor else inf  # the mean over no rows is nan, and its gradient is zero
    # The gradient is made now, from arrays that are not needed any more; backward only scales it.
    gradient = xp.exp(log_q, out=log_q)
    gradient -= p
    gradient *= weight * temperature / of_gradient
    hard = xp.exp(log_hard, out=log_hard)
    hard[rows, flat] -= 1
    hard *= (1 - weight) / of_gradient
    gradient += hard
    if counted is not None:
        losses *= counted
        gradient *= counted[:, None]

    edges = ((student, partial(imul, gradient.reshape(shape))),)
    result = record("distillation_loss", losses.sum() / divisor, edges, cost=15 * scores.size, saved=(gradient,))
    return named_mean(result, mean_over) if mean_over else result


def teacher_rows(teacher_logits: Any, shape: tuple[int, ...]) -> xp.Array:
    """Return the teacher's logits as a float array of `shape`; AutogradError when they would need a gradient."""
    if isinstance(teacher_logits, Tensor):
        if teacher_logits.requires_grad:
            raise AutogradError(
                "distillation_loss: the teacher's logits need a gradient, and a teacher gets none; compute them under"
                " no_grad()"
            )
        teacher_logits = teacher_logits.data
    array = xp.as_array(teacher_logits)
    if array.shape != shape:
        raise ShapeError(
            f"distillation_loss: the teacher's logits of shape {array.shape} for logits of shape {shape}; teacher and"
            " student need the same classes (vocabulary) and the same rows"
        )
    return upcast(array) if is_half(array.dtype) else array


def log_softmax(scores: xp.Array) -> xp.Array:
    """Return a new array: score - largest - log(sum of exp(score - largest)), by row."""
    shifted: xp.Array = scores - scores.max(axis=-1, keepdims=True)
    shifted -= xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
