"""What a job asks of a strategy, in addition to the phases of a step in `core/train/strategy.py`.

    steps_read, data_copy        which samples this rank reads
    held_out_losses              an evaluation
    clip                         one norm of the gradient, over all axes together
    gradients, optimizer_state, local_arrays, sizes    what this rank holds
    tensors                      gradients, weights and optimizer state by name, however they are sharded
    seen_from, replica_of, owns, buffers, scalars      a checkpoint

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py, tests/equality/test_equality.py
"""

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.train import strategy
from minidist.job.checkpoint.held import Buffer, ReplicaId
from minidist.job.config.train_config import Batches
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis, Tensors
from minidist.nn.buffers import named_buffers
from minidist.optim import norm_from_blocks
from minidist.parallel.tensor import full_tensor


class MeshStrategy(strategy.Strategy):
    """This rank's part of a job. axes: None on one device."""

    job: Job
    data_axes: list[DataAxis]  # type: ignore[assignment]  # with what a job asks of them

    def __init__(self, job: Job, axes: Any, data_axes: Sequence[DataAxis]) -> None:
        super().__init__(job, axes, data_axes)
        self.job = job
        self.updates = 0  # made so far; a rank without parameters has no optimizer that counts them
        for axis in self.data_axes:
            for extension in job.extensions:
                extension.axis_made(axis)

    def synchronize(self, now: bool) -> None:
        # A technique may have the gradients of every micro-batch reduced.
        super().synchronize(now or any(each.reduces_each for each in self.job.extensions))

    def update(self, step: int) -> None:
        if self.job.clip is not None:
            self.clip(self.job.clip)
        super().update(step)

    def step(self, lr_factor: float) -> None:
        super().step(lr_factor)
        self.updates += 1

    # --- the norm of the gradient -------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> float:
        """Bound the norm of the global gradient, in which each element counts once; returns the norm before."""
        # One norm over all axes, so that every rank scales by the same factor.
        norm = norm_from_blocks(self.square_sums())
        for axis in self.data_axes:
            axis.clip(norm, max_norm)
        return norm

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

    # --- batches ------------------------------------------------------------------------------------------------------

    def steps_read(self, done: int) -> Iterable[int]:
        """Return the steps after the first `done` whose batches this rank reads, in order."""
        return range(done, self.job.config.steps)

    def cut_batches(self, batches: Batches) -> None:
        """Cut the samples of the next steps into other micro-batches. Every rank calls it between two steps."""
        self.job.batches = self.job.plan.batches = batches

    def data_copy(self) -> int | None:
        """Return the number of the copy of the step's data that this rank has read its share of.

        None while batches of later steps are on their way.
        """
        # Data-parallel ranks share the samples; every coordinate on the other axes has all of them.
        axes = self.axes
        if axes is None:
            return 0
        return (axes.pp.rank * axes.cp.size + axes.cp.rank) * axes.tp.size + axes.tp.rank

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def held_out_losses(self, job: Job) -> list[float]:
        """Return the losses of this rank's held-out micro-batches, forward only; job: this one, `evaluating`."""
        k = job.batch.shares.accumulation
        return [job.loss_at(0, self.axes.dp.rank * k + i).item() for i in range(k)]

    # --- what this rank holds -----------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Number of updates made so far."""
        return max((axis.optimizer.step_count for axis in self.data_axes), default=self.updates)

    @property
    def counts(self) -> dict[str, int]:
        """The updates of each parameter that has had fewer than the others; usually none."""
        return {name: count for axis in self.data_axes for name, count in axis.optimizer.counts.items()}

    def optimizer_state(self) -> dict[str, dict[str, Array]]:
        """Return {parameter name: state arrays of this rank}; of a shared parameter's equal replicas, the first."""
        result: dict[str, dict[str, Array]] = {}
        for axis in self.data_axes:
            for name, arrays in axis.optimizer.state.items():
                result.setdefault(name, arrays)
        return result

    def gradients(self) -> list[Array]:
        """Return the flat arrays of the summed gradient, multiplied by `self.job.scale`; divide by it.

        Whole without ZeRO; with ZeRO 1, 2 and 3 this rank's shards, padded with zeros.
        """
        return [gradient for axis in self.data_axes for gradient in axis.gradients()]

    def local_arrays(self) -> list[Array]:
        """Return the flat weights that this rank holds."""
        return [array for axis in self.data_axes for array in axis.local_arrays()]

    def sizes(self) -> list[AxisSizes]:
        """Return the element counts from which the closed forms of the volumes follow."""
        return [replace(axis.sizes(), more=self._more(axis)) for axis in self.data_axes]

    def _more(self, axis: DataAxis) -> dict[str, Any]:
        """Return what techniques add to the element counts of an axis."""
        return {name: value for extension in self.job.extensions for name, value in extension.sizes(axis).items()}

    def tensors(self) -> Tensors:
        """Return copies of the whole gradients, weights and optimizer state by name. Every rank calls it."""
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for axis in self.data_axes:
            by_name = {p.name: p for p in axis.parameters}
            for kind, table in axis.tensors().items():
                for key, array in table.items():
                    # Optimizer state is named PARAMETER.KEY and is flat.
                    name = key.rpartition(".")[0] if kind == "optimizer" else key
                    whole = full_tensor(array, by_name[name].layout, self.axes)
                    result[kind].setdefault(key, whole.reshape(-1) if kind == "optimizer" else whole)
        return result

    # --- places in a checkpoint ---------------------------------------------------------------------------------------

    def seen_from(self, comm: Comm) -> Self:
        """Return this strategy with what rank `comm.rank` has in a checkpoint: the shapes, and no values."""
        # The rank's place on every axis decides which part of a tensor it has.
        other = copy(self)
        other.axes = self.axes.dims.axes(comm)
        other.data_axes = [
            axis.seen_from(other.axes.expert_data if axis.experts else other.axes.data) for axis in self.data_axes
        ]
        return other

    def replica_of(self, axis: DataAxis, parameter: Parameter) -> ReplicaId:
        """Return this rank's number among the ranks off the data axis that hold the same tensor-parallel shard."""
        return ReplicaId(*self.copy_of(axis, parameter))

    def owns(self, axis: DataAxis, parameter: Parameter) -> bool:
        """Return whether this is the parameter itself, and not a replica that a pipeline holds in another place."""
        return True

    def buffers(self) -> list[Buffer]:
        """Return what modules of this rank keep next to parameters: running statistics of batch normalisation."""
        replica = ReplicaId(self.axes.comm.rank, self.axes.comm.size)
        return [(name, array, replica) for name, array in named_buffers(self.job.model)]

    # --- numbers in a checkpoint --------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return numbers for a checkpoint, equal on all ranks: those of techniques."""
        return {name: value for extension in self.job.extensions for name, value in extension.scalars().items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Restore the numbers of `scalars`."""
        for extension in self.job.extensions:
            extension.load_scalars(scalars)
