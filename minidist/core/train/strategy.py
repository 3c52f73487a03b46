"""A strategy: this rank's part of the training, as one method per phase of a step.

    zero_grad()               clear the gradients of the previous step
    forward_backward(step)    this rank's micro-batches; gradients are summed over all ranks when it returns
    update(step)              clip by the norm of the global gradient, and let the optimizers step

On a mesh without a pipeline each data-parallel rank runs its own micro-batches through the model:

    micro-batch i    forward, backward     while i is not the last: gradients are added on this rank (`no_sync`)
    the last one     forward, backward     buckets are reduced over the data axis while backward runs

Tensor, context and expert parallelism are inside the model and send by themselves. What is left to do here concerns all
axes together: one norm of the gradient.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.optim import norm_from_blocks
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
        """Clip the gradient of a step and update the weights."""
        if self.task.clip is not None:
            self.clip(self.task.clip)
        self.step(self.task.lr_factor(step))

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the global gradient, in which each element counts once; returns the norm before."""
        # One norm over all axes, so that every rank scales by the same factor.
        norm = norm_from_blocks(self.square_sums())
        for axis in self.data_axes:
            axis.clip(norm, max_norm)
        return norm

    def step(self, lr_factor: float) -> None:
        """Update the weights with `lr_factor` times the learning rate."""
        for axis in self.data_axes:
            axis.optimizer.lr_factor = lr_factor
            axis.step()

    def square_sums(self) -> Array:
        """Return sums of squares of the global gradient by blocks of 1,024 elements, the same on every rank."""
        return xp.concatenate([self.square_sums_of(axis) for axis in self.data_axes])

    def square_sums_of(self, axis: DataAxis, skip: Collection[Parameter] = ()) -> Array:
        """Return one data axis's part of `square_sums`: shards of tp and ep are summed, and replicas count once."""
        # A parameter that several ranks off the data axis hold counts on the first of them.
        repeated = [p for p in axis.parameters if self.copy_of(axis, p)[0]]
        blocks = axis.square_sums({*skip, *repeated})

        # Added in rank order, so that every rank has the same bits.
        for comm in (self.axes.tp, *([self.axes.ep] if axis.experts else [])):
            if comm.size > 1:
                with purpose("clip_norm"):
                    all_reduce(comm, blocks, algorithm="ordered")
        return blocks

    def copy_of(self, axis: DataAxis, parameter: Parameter) -> tuple[int, int]:
        """Return this rank's number among the ranks off the data axis that hold the same shard, and their number."""
        number, count = 0, 1
        for name in ("tp", "ep") if axis.experts else ("tp",):
            comm, layout = self.axes[name], parameter.layout
            # Of the ranks of an axis, those that hold one shard: `copies`, where the axis cuts the parameter, or all.
            same = layout.copies if layout is not None and name in layout.axes else comm.size
            number, count = number * same + comm.rank % same, count * same
        return number, count
