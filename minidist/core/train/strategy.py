"""A strategy: this rank's part of the training, as one method per phase of a step.

    zero_grad()               clear the gradients of the previous step
    forward_backward(step)    this rank's micro-batches; gradients are summed over all ranks when it returns
    update(step)              let the optimizers step

Without a pipeline each data-parallel rank runs its own micro-batches through the model (ZeRO 2 and 3 reduce in each):

    micro-batch i    forward, backward     while i is not the last: gradients are added on this rank (`no_sync`)
    the last one     forward, backward     buckets are reduced over the data axis while backward runs

Tensor, context and expert parallelism are inside the model and send by themselves.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from minidist.core.parallel.dims import Axes
from minidist.core.train.data_axis import DataAxis
from minidist.core.train.task import Task


class Strategy:
    """This rank's data axes: one for each stage, and another for experts that are distributed over ranks.

    axes: this rank's communicators. model: what the forward pass calls, wrapped by all data axes.
    """

    def __init__(self, task: Task, axes: Axes, data_axes: Sequence[DataAxis]) -> None:
        self.task, self.axes, self.data_axes = task, axes, list(data_axes)
        self.model: Any = self.data_axes[-1].model if self.data_axes else task.model

    def zero_grad(self) -> None:
        """Clear the gradients of the previous step."""
        for axis in self.data_axes:
            axis.zero_grad()

    def forward_backward(self, step: int) -> list[float]:
        """Run this rank's micro-batches of a step and return their losses; the gradients are summed over all ranks."""
        task, comm, m = self.task, self.axes.comm, self.task.microbatches
        losses = []
        for i in range(m):
            number = self.axes.dp.rank * m + i
            batch = task.micro_batch(step, number)
            # Gradients are sent while the last backward runs.
            with task.coordinates(step, number), self.no_sync() if i < m - 1 else nullcontext():
                loss = task.loss(*batch, self.model)
                comm.advance_clock("forward")

                task.scaled(loss).backward()
                comm.advance_clock("backward")
            losses.append(loss.item())
        return losses

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which the gradients of a pass stay on this rank."""
        stack = ExitStack()
        for axis in self.data_axes:
            stack.enter_context(axis.no_sync())
        return stack

    def update(self, step: int) -> None:
        """Update the weights with the gradient of a step."""
        self.step(self.task.lr_factor(step))

    def step(self, lr_factor: float) -> None:
        """Update the weights with `lr_factor` times the learning rate."""
        for axis in self.data_axes:
            axis.optimizer.lr_factor = lr_factor
            axis.step()
