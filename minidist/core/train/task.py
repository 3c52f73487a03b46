"""What is trained: a model, its micro-batches, its loss and its optimizer; model and batches do not depend on ranks.

    micro-batch number       0  1  2  3 | 4  5  6  7       the i-th of the m of replica r has the number r m + i,
    replica (dp rank)            0      |      1           on every rank and in every layout

A loss is divided by the rows or tokens of the whole step, so the sum over all micro-batches is the mean. `global_loss`
adds the losses of all ranks in their global order.

How the ranks of a job share its model and its batch: a degree for each axis, and what is chosen on each of them.

    symbol                 what it divides                                    source
    pp, schedule, v        a pipeline of pp ranks with v stages each          GPipe; PipeDream; Megatron-LM
    dp, zero, reduction    replicas, and what they shard                      PyTorch DDP; ZeRO; FSDP
    cp, attention, u       parts of each sequence                             Ring Attention; DeepSpeed-Ulysses; USP
    tp, sequence_parallel  shards of each matrix                              Megatron-LM; Korthikanti et al.
    ep                     shares of the experts                              GShard

Proved by: tests/train/test_core_runs.py, tests/equality/test_equality.py, tests/train/test_evaluate.py,
tests/parallel/test_dims.py
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import Array
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.nn.gpt import LanguageModel
from minidist.core.parallel.dims import Axes, ParallelDims


@dataclass(kw_only=True)
class Task(ABC):
    """The base class: what `parallelize` and the strategies ask for. A subclass has the data and the optimizer.

    model: whole, until `parallelize` puts this rank's parts in its place. dtype: of the model. seed: of dropout.
    context: tokens of a whole sample. positions: of this rank's tokens, which `parallelize` sets for split sequences.
    """

    model: Any
    dtype: Any = np.float32
    seed: int = 0
    context: int = 0
    positions: Array | None = None

    @property
    @abstractmethod
    def microbatches(self) -> int:
        """The number m of micro-batches of a replica in a step."""

    @property
    @abstractmethod
    def divisor(self) -> float:
        """The number of rows or tokens of the whole step, by which the loss is divided."""

    @abstractmethod
    def first_row(self, number: int) -> int:
        """Return the number of the first row of a micro-batch in the step's global batch, on which dropout depends."""

    @abstractmethod
    def whole_batch(self, step: int, number: int) -> tuple[Any, Any]:
        """Return the inputs and targets of micro-batch `number` of a step, of whole samples."""

    @abstractmethod
    def optimizer(self, group: Any) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer's class and its settings for the parameters of a `data_axis.Group`."""

    def lr_factor(self, step: int) -> float:
        """Return by what the learning rate is multiplied in a step."""
        return 1.0

    def layers_split(self, axes: Axes) -> None:  # noqa: B027  most tasks change nothing
        """Change the model after its layers were split over ranks, and before it is cut into stages."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward starts."""
        return loss

    @property
    def is_language_model(self) -> bool:
        """Whether the model takes targets and computes its loss itself."""
        return isinstance(self.model, LanguageModel)

    @property
    def criterion(self) -> Callable[..., Tensor]:
        """The loss function (logits, targets, divisor) of a model that returns logits."""
        return cross_entropy

    def coordinates(self, step: int, number: int) -> AbstractContextManager[Any]:
        """Return the context in which a micro-batch runs: it sets the coordinates of its samples, for dropout."""
        return hooks.batch_coordinates(step, self.first_row(number), self.seed, self.positions, self.context)

    def micro_batch(self, step: int, number: int) -> tuple[Any, Any]:
        """Return inputs and targets of micro-batch `number` of a step; if sequences are split, this rank's tokens."""
        return self.local(*self.whole_batch(step, number))

    def local(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return this rank's part of whole samples: all rows, and with context parallelism its columns of them."""
        if self.positions is None:
            return inputs, targets
        return inputs[:, self.positions], targets[:, self.positions]

    def loss(self, inputs: Any, targets: Any, model: Any = None) -> Tensor:
        """Return the loss of a micro-batch, scaled to its share of the global mean. model: in place of the task's."""
        model = model or self.model
        if not self.is_language_model:
            return self.loss_of(model(as_input(inputs, self.dtype)), targets)
        # A language model computes its loss itself: tensor parallelism replaces its `loss_fn`.
        loss: Tensor = model(inputs, targets, self.divisor)
        return loss

    def loss_of(self, outputs: Any, targets: Any) -> Tensor:
        """Return a micro-batch's share of the mean loss from the model's outputs, with the experts' auxiliary loss."""
        if not self.is_language_model:
            return self.criterion(outputs, targets, self.divisor)

        # A model with experts returns their auxiliary loss in addition to the logits.
        logits, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        loss: Tensor = self.model.loss_fn(logits, targets, self.divisor)
        if auxiliary:
            loss = self.model.with_auxiliary(loss, auxiliary[0], targets.size / self.divisor)
        return loss


def as_input(inputs: Any, dtype: Any) -> Any:
    """Return tokens unchanged, and features as a tensor of the model's dtype."""
    return inputs if inputs.dtype.kind in "iu" else Tensor(xp.as_array(inputs, dtype))


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


@dataclass(frozen=True)
class ParallelLayout(ParallelDims):
    """The degrees of `ParallelDims`, and how each axis works.

    zero: 0, whole replicas; 1 shards the optimizer, 2 the gradients too, 3 the parameters too. reduction: the algorithm
    that sums gradients. schedule, chunks (v): of the pipeline. attention: how the parts of a sequence meet. ulysses
    (u): neighbours that exchange heads, with "ulysses-ring". sequence_parallel: norms and dropout on 1/tp of it.
    """

    zero: int = 0
    reduction: str = "ring"
    schedule: str = "1f1b"
    chunks: int | None = None
    attention: str = "ring"
    ulysses: int = 2
    sequence_parallel: bool = False
