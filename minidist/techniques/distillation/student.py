"""What a student's loss compares: the labels of a micro-batch, and the teacher's logits for it.

Proved by: tests/techniques/test_distillation.py
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.techniques.distillation.loss import distillation_loss
from minidist.techniques.distillation.split_loss import vocab_parallel_distillation_loss


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

    settings: `DistillationSettings`. of_labels: the loss without a teacher. comm: the tensor-parallel ranks of a
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
