"""Knowledge distillation as one node: a student learns from labels, and from a teacher's probabilities.

    loss = (1 - a) * cross-entropy of the labels  +  a * T^2 * KL(p || q),    p = softmax(teacher's logits / T)
                                                                              q = softmax(student's logits / T)

A temperature T above 1 shows how the teacher ranks the wrong classes. The gradient of the second term falls with
1 / T^2, so it is multiplied by T^2, and a means the same at every temperature. With z the student's logits, the
gradient of a row is

    d loss / d z = (1 - a) * (softmax(z) - onehot)  +  a * T * (q - p)

Where the vocabulary of a student is split, each rank has the student's logits of its words, and the teacher's of all.
With m the largest logit of a row, the loss needs of all words

    max z                       [1] all-reduce, max
    z of the label - m          ┐
    sum exp(z - m)              │ [2] one all-reduce: each rank adds the terms of its words,
    sum exp((z - m) / T)        │     and log q = (z - m) / T - log of the fourth line
    sum p (z - m) / T           ┘

p needs no message, because every rank knows the teacher's logits of all words. So five numbers per token travel, where
`vocab_parallel_cross_entropy` sends three, and nothing in backward.

Sources: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015 (arXiv:1503.02531), section 2;
Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3 (of the split loss).
Proved by: tests/techniques/test_distillation_loss.py, tests/techniques/test_split_distillation_loss.py
"""

from collections.abc import Callable
from functools import cached_property, partial
from math import inf
from operator import imul
from typing import Any

from minidist.base.errors import AutogradError, ShapeError, UsageError, quoted
from minidist.base.limits import check_number
from minidist.core.autograd.operators import operand
from minidist.core.autograd.ops.cross_entropy import checked_targets, divisor_and_rows
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import Array, is_half, upcast
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.parallel.tensor_parallel import vocab_range
from minidist.parallel.volume import Volume


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
    return hooks.named_mean(result, mean_over) if mean_over else result


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


def vocab_parallel_distillation_loss(
    logits: Tensor,
    targets: Any,
    teacher_logits: Any,
    temperature: float,
    weight: float,
    divisor: float | None = None,
    *,
    comm: Comm,
    vocab_size: int,
) -> Tensor:
    """`distillation_loss` from logits (..., padded V / t) of this rank's words; the same tensor on all ranks, shape ().

    targets (...), words or -100, which is ignored; teacher_logits (..., V), equal on all ranks. divisor: default the
    number of rows that are not ignored. Sends two all-reduces in forward, of one and of four numbers per row (purpose
    `tensor_forward`), and nothing in backward. Raises ShapeError for other shapes.
    """
    x, shape = operand(logits), logits.shape
    first, last = vocab_range(vocab_size, comm.rank, comm.size)
    rows = teacher_rows(teacher_logits, (*shape[:-1], vocab_size)).reshape(-1, vocab_size)
    flat = xp.as_array(targets).reshape(-1)
    if flat.size != len(rows):
        raise ShapeError(
            f"vocab_parallel_distillation_loss: targets of shape {targets.shape} for logits of shape {shape}"
        )

    counted = flat != -100
    divisor, mean_over = divisor_and_rows("vocab_parallel_distillation_loss", divisor, flat, counted)

    # The student's logits of this rank's words, without the padding, and the teacher's probabilities of all.
    scores = x.data.reshape(flat.size, shape[-1])[:, : last - first]
    log_p = log_softmax(rows.astype(scores.dtype, copy=False) / temperature)
    p = xp.exp(log_p)
    entropy = -(p * xp.maximum(log_p, -1e30)).sum(axis=-1)

    # The label's logit is on one rank.
    own = xp.as_array((flat >= first) & (flat < last)).nonzero()[0]
    column, p = flat[own] - first, p[:, first:last]
    hard, soft, (label, total_hard, total_soft, cross) = _of_all_words(comm, scores, p, (own, column), temperature)

    # KL(p || q) = -entropy of p - sum p log q. All ranks compute the same loss.
    divergence = xp.log(total_soft) - cross - entropy
    losses = (weight * temperature**2) * divergence + (1 - weight) * (xp.log(total_hard) - label)
    loss = (losses * counted).sum() / divisor

    # The gradient is made now, as by `distillation_loss`; that of the padding is zero.
    gradient = xp.zeros((flat.size, shape[-1]), scores.dtype, scores)
    hard /= total_hard[:, None]
    hard[own, column] -= 1
    divisor = divisor if divisor == divisor else inf
    gradient[:, : last - first] = (soft / total_soft[:, None] - p) * (weight * temperature / divisor)
    gradient[:, : last - first] += hard * ((1 - weight) / divisor)
    gradient *= counted[:, None]

    edges = ((x, partial(imul, gradient.reshape(shape))),)
    result = record("vocab_parallel_distillation_loss", loss, edges, cost=15 * scores.size, saved=(gradient,))
    return hooks.named_mean(result, mean_over) if mean_over else result


def _of_all_words(comm: Comm, scores: Any, p: Any, label: tuple[Any, Any], temperature: float) -> tuple[Any, Any, Any]:
    """Return exp(z - m) and exp((z - m) / T) of this rank's words, and the four sums of all words.

    scores: z, (rows, own words). p: the teacher's probabilities of these. label: rows and columns of the labels here.
    """
    comm.advance_clock("tensor_forward")
    with purpose("tensor_forward"):
        # [1] A rank that has only padding contributes minus infinity.
        largest = xp.full(len(scores), -inf, scores.dtype, scores)
        if scores.size:
            largest = scores.max(axis=-1)
        all_reduce(comm, largest, "max")
        scores = scores - largest[:, None]

        # [2] Ranks without the label add zero.
        sums = xp.zeros((4, len(scores)), scores.dtype, scores)
        sums[0, label[0]] = scores[label]
        hard, soft = xp.exp(scores), xp.exp(scores / temperature)
        sums[1], sums[2], sums[3] = hard.sum(axis=-1), soft.sum(axis=-1), (p * scores).sum(axis=-1) / temperature
        all_reduce(comm, sums)
    return hard, soft, sums


def distillation_volume(tokens: int, ranks: int) -> Volume:
    """Return the elements sent by `vocab_parallel_distillation_loss`: all-reduces of five numbers per token."""
    return Volume(forward=5 * 2 * (ranks - 1) * tokens)


class SoftTargets:
    """The labels of a micro-batch, and the teacher's logits for it, which are asked for when the loss is computed."""

    def __init__(self, labels: Array, ask: Callable[[], Array]) -> None:
        self.labels, self._ask = labels, ask
        self.size, self.shape, self.dtype = labels.size, labels.shape, labels.dtype

    @cached_property
    def logits(self) -> Array:
        """The teacher's logits, (..., classes)."""
        return self._ask()


class DistillationLoss:
    """The loss function of a student: labels and the teacher, or labels alone where the job is evaluated.

    settings: `Distillation.Settings`. of_labels: the loss without a teacher. comm: the tensor-parallel ranks of a
    language model of `vocab_size` words. Each of them has the logits of a part of the words.
    """

    def __init__(
        self, settings: Any, of_labels: Callable[..., Tensor], comm: Comm | None = None, vocab_size: int = 0
    ) -> None:
        self.temperature, self.weight, self.of_labels = settings.temperature, settings.distill_weight, of_labels
        self.comm, self.vocab_size = comm, vocab_size

    def __call__(self, logits: Tensor, targets: Any, divisor: float | None = None) -> Tensor:
        """Return a tensor of shape (). targets: SoftTargets, or labels."""
        if not isinstance(targets, SoftTargets):
            return self.of_labels(logits, targets, divisor)
        parts = (logits, targets.labels, targets.logits, self.temperature, self.weight, divisor)
        # Tensor parallelism: this rank has the logits of its words.
        if self.comm is not None:
            return vocab_parallel_distillation_loss(*parts, comm=self.comm, vocab_size=self.vocab_size)
        return distillation_loss(*parts)
