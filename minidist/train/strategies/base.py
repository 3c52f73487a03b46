"""What the training loop asks of a layout, and who answers: a `Strategy` is this rank's data axes and what joins them.

    forward_backward(step)   this rank's micro-batches of a step; leaves gradients that are summed over all ranks
    zero_grad, clip, step
    tensors()                gradients, weights and optimizer state, whole and by name, whatever is sharded or cut

The recipe builds it (recipe.py). The reference is a strategy too: one data axis and nobody else.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np

from minidist.autograd import Parameter, flop_counter
from minidist.base.arrays import Array
from minidist.base.half import all_finite
from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.config.pipeline_plan import cut_stages, make_plan
from minidist.optim import block_square_sums, norm_from_blocks
from minidist.parallel import agree_on_overflow
from minidist.parallel.dims import Axes
from minidist.parallel.tensor import full_tensor
from minidist.train.job import Job
from minidist.train.strategies.data_axis import DataAxis, Tensors, gradient_of
from minidist.train.strategies.units import unit_parameters


class Optimizers:
    """The optimizers of all data axes, looked at as one."""

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = list(each)

    @property
    def step_count(self) -> int:
        """Steps so far."""
        return max((optimizer.step_count for optimizer in self.each), default=0)

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """Parameter name -> state arrays; of a shared parameter's copies, which are equal, the first."""
        result: dict[str, dict[str, Array]] = {}
        for optimizer in self.each:
            for name, arrays in optimizer.state.items():
                result.setdefault(name, arrays)
        return result


class Strategy:
    """This rank's data axes, used as one. model: what the forward pass calls (a pipeline calls its stages instead)."""

    def __init__(self, job: Job, axes: Axes, data_axes: Sequence[DataAxis]) -> None:
        self.job, self.axes, self.data_axes = job, axes, list(data_axes)
        self.optimizer = Optimizers([axis.optimizer for axis in self.data_axes])
        self.model: Any = job.model
        for axis in self.data_axes:
            self.model = axis.wrap(self.model)

    # a step -----------------------------------------------------------------------------------------------------------

    def forward_backward(self, step: int) -> list[float]:
        """Forward and backward of this rank's micro-batches, gradients summed over them and over the ranks; their
        losses.
        """
        job, comm, k = self.job, self.axes.comm, self.job.batches.accumulation
        counted, losses = flop_counter.get(), []
        for i in range(k):
            number = self.axes.dp.rank * k + i
            together = i == k - 1 or job.config.synchronize_each
            with job.coordinates(step, number), nullcontext() if together else self.no_sync():
                loss = job.loss(step, number, self.model)
                comm.compute(counted.take() if counted else (), name="forward")
                job.scaled(loss).backward()
                comm.compute(counted.take() if counted else (), name="backward")
            losses.append(loss.item())
        return losses

    def held_out_losses(self, job: Job) -> list[float]:
        """Those of this rank's micro-batches of the first step's data, forward only; job: this one, `evaluating`."""
        k = job.batches.accumulation
        return [job.loss(0, self.axes.dp.rank * k + i).item() for i in range(k)]

    def no_sync(self) -> AbstractContextManager[Any]:
        """The gradients of a pass in the block stay on this rank."""
        stack = ExitStack()
        for axis in self.data_axes:
            stack.enter_context(axis.no_sync())
        return stack

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for axis in self.data_axes:
            axis.zero_grad()

    def overflow(self) -> bool:
        """Is a summed gradient infinite or NaN anywhere, on any rank of any axis? Everybody gets the same answer."""
        return agree_on_overflow(self.axes.comm, self.overflow_here())

    def overflow_here(self) -> bool:
        """The same of what this rank holds."""
        return not all(map(all_finite, self.gradients()))

    def gradients(self) -> list[Array]:
        """What this rank holds of the summed gradient, as it is stored."""
        return [gradient for axis in self.data_axes for gradient in axis.gradients()]

    def unscale(self, factor: float) -> None:
        """The next step multiplies every gradient by `factor` (1 / loss scale), before it is clipped."""
        for axis in self.data_axes:
            axis.optimizer.grad_scale = factor

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the global gradient, in which every element of the model counts once; the norm before."""
        norm = norm_from_blocks(self.square_sums())
        for axis in self.data_axes:
            axis.clip(norm, max_norm)
        return norm

    def square_sums(self) -> Array:
        """Sums of squares of the global gradient by blocks of 1,024 elements, the same on every rank."""
        return np.concatenate([self.squares_of(axis) for axis in self.data_axes])

    def squares_of(self, axis: DataAxis, skip: Collection[Parameter] = ()) -> Array:
        """One data axis's part: tiles are added up over the ranks that have them; of copies the first one counts."""
        repeated = [p for p in axis.parameters if self.copy_of(axis, p)[0]]
        blocks = axis.square_sums({*skip, *repeated})
        for comm in (self.axes.tp, *([self.axes.ep] if axis.experts else [])):
            if comm.size > 1:
                with purpose("clip_norm"):
                    all_reduce(comm, blocks, algorithm="ordered")
        return blocks

    def copy_of(self, axis: DataAxis, parameter: Parameter) -> tuple[int, int]:
        """(number of this rank, how many) among the ranks off the data axis that hold the same tile."""
        number, copies = 0, 1
        for name in ("tp", "ep") if axis.experts else ("tp",):
            comm, layout = self.axes[name], parameter.layout
            alike = layout.copies if layout is not None and name in layout.axes else comm.size
            number, copies = number * alike + comm.rank % alike, copies * alike
        return number, copies

    def step(self, lr_factor: float) -> None:
        """The optimizers' step, with so much of the learning rate."""
        for axis in self.data_axes:
            axis.optimizer.lr_factor = lr_factor
            axis.step()

    # what is here -----------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Copies of gradients, weights and optimizer state by name, whole. Every rank calls it."""
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for axis in self.data_axes:
            by_name = {p.name: p for p in axis.parameters}
            for kind, table in axis.tensors().items():
                for key, array in table.items():
                    name = key.rpartition(".")[0] if kind == "optimizer" else key
                    whole = full_tensor(array, by_name[name].layout, self.axes)
                    result[kind].setdefault(key, whole.reshape(-1) if kind == "optimizer" else whole)
        return result

    def counts(self, axis: DataAxis, parameter: Parameter) -> bool:
        """Is this the parameter itself, and not a copy that a pipeline has in another place?"""
        return True

    def scalars(self) -> dict[str, float]:
        """Numbers for a checkpoint, equal on all ranks: the loss scale and its counters."""
        scaler = self.job.scaler
        return {} if scaler is None else {f"loss_scale.{name}": value for name, value in scaler.state_dict().items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Go on from there."""
        if self.job.scaler is not None:
            self.job.scaler.load_state_dict(
                {name.removeprefix("loss_scale."): value for name, value in scalars.items()}
            )

    def local_arrays(self) -> list[Array]:
        """The flat values that this rank holds."""
        return [array for axis in self.data_axes for array in axis.local_arrays()]


class OneDevice(Strategy):
    """The whole model and optimizer on this rank, and no message: the reference's."""

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, job.model
        self.data_axes = [DataAxis(job, job.model.parameters())]
        (self.flat,) = self.data_axes[0].flats
        self.optimizer = Optimizers([self.data_axes[0].optimizer])

    def overflow(self) -> bool:
        return self.overflow_here()

    def square_sums(self) -> Array:
        """In the order of the units that the layout shards (see optim/clip.py)."""
        units = self.clip_units()
        return np.concatenate(
            [block_square_sums(np.concatenate([gradient_of(p).reshape(-1) for p in unit])) for unit in units]
        )

    def clip_units(self) -> list[list[Parameter]]:
        """Parameters whose gradients lie one after the other where the layout takes the norm."""
        job, stages = self.job, [self.job.model]
        tied: list[str] = []
        if job.config.pp > 1:
            stages, tied = cut_stages(job.config, job.model, make_plan(job.config, job.batches.accumulation).stages)
        units = []
        for number, module in enumerate(stages):
            parts = [list(module.parameters())]
            if job.config.zero == 3:
                parts = unit_parameters(module, job.config.persistence_threshold, tied)
            elif job.config.zero == 2:
                parts = [[p for p in parts[0] if p.name not in tied], [p for p in parts[0] if p.name in tied]]
            units += [[p for p in part if number == 0 or p.name not in tied] for part in parts]
        return [unit for unit in units if unit]

    def tensors(self) -> Tensors:
        return self.data_axes[0].tensors()
