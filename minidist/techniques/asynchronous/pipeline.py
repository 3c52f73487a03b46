"""Asynchronous pipelines as a strategy: a stream of mini-batches that does not drain between steps.

    pipedream, pipedream-vertical-sync   a step is one mini-batch of one micro-batch, and one update of every stage
    pipedream-2bw                        a step is a batch of m micro-batches, and one update

A stream ends, and the pipeline drains, after every step that writes a checkpoint or computes the held-out loss (as
PipeDream's own runtime drains at the end of an epoch), and at the end of the job. Then every rank has the latest
weights and nothing is in flight, so a checkpoint holds weights and optimizer state and no stashed version, any layout
can load it, and a resumed job continues with the bits of the undisturbed one. What a stream does depends on where it
began: jobs with other `--every` or `--evaluate-every` train to other weights.

    --every 4     step  0 1 2 3 | 4 5 6 7 | 8 9      each part begins with version 0, the latest of the part before it

Between steps ranks hold different versions: those of later stages are newer. What `tensors` shows after step t is each
stage's latest version, which step t's update made. `minidist compare` compares it with a replay on one device
(`replay.py`), which computes each micro-batch with the weight versions that the version rule names,
and drains where this does. Memory is that of the versions in use; it does not grow with the number of steps.

Proved by: tests/train/test_asynchronous.py
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from minidist.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.nn.flat import FlatParameters
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.core.parallel.dims import Axes
from minidist.core.pipeline.runtime import PipelineStage
from minidist.core.train.strategy import release_other_stages
from minidist.core.train.task import ParallelLayout
from minidist.data.sampler import SIDES
from minidist.job.checkpoint.held import ReplicaId
from minidist.job.config.pipeline_plan import cut_stages, make_plan, period_of, stream_end, streams
from minidist.job.train.job import Job, make_optimizer
from minidist.job.train.state import reads_tensors
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis, Replicas, Tensors
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.pipeline import gather_tensors, input_arrays
from minidist.optim import OptimizerWrapper
from minidist.parallel import reduced_elements
from minidist.pipeline.runtime.evaluation import Evaluation
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.stream import Stream
from minidist.pipeline.runtime.versioned import MicroBatches, VersionedPipeline
from minidist.pipeline.runtime.versions import UnitVersions


class ScheduledOptimizer(OptimizerWrapper):
    """An optimizer whose learning rate follows the job's schedule by the number of updates that it has made."""

    def __init__(self, job: Job, flat: FlatParameters) -> None:
        self.schedule, self.optimizer = job.lr_factor, make_optimizer(job, flat)

    def step(self) -> None:
        """Make one update."""
        self.optimizer.lr_factor = self.schedule(self.optimizer.step_count)
        self.optimizer.step()


class UnitAxis(DataAxis):
    """The parameters of one unit of a stage, as a checkpoint sees them when the pipeline has drained."""

    def __init__(self, unit: UnitVersions, stage: int, replica: ReplicaId, updates: Callable[[int], int]) -> None:
        optimizer = _CountedOptimizer(unit.optimizer, updates)
        super().__init__([unit.flat], optimizer, model=None)
        self.stage, self.replica = stage, replica

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.replica, self.replica)


class _CountedOptimizer(OptimizerWrapper):
    """An optimizer for a checkpoint, which has one count. updates: that count -> updates of this optimizer."""

    def __init__(self, optimizer: ScheduledOptimizer, updates: Callable[[int], int]) -> None:
        self.optimizer, self.updates = optimizer.optimizer, updates

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict({**saved, "step": self.updates(saved["step"])})


class AsynchronousPipeline(MeshStrategy):
    """This rank's stage of an asynchronous pipeline; sends what `Stream` sends."""

    def __init__(
        self, job: Job, axes: Axes, layout: ParallelLayout, data_axes_of: Callable[..., list[DataAxis]]
    ) -> None:
        config = job.config
        self.keeps_gradients = job.observers is None or reads_tensors(job.observers)
        plan = make_plan(config, job.batches.accumulation)
        modules, tied = cut_stages(config, job.model, plan.stages)
        release_other_stages(modules, plan.stages_of(axes.pp.rank))
        stages = [PipelineStage(modules[number], number) for number in plan.stages_of(axes.pp.rank)]
        self.versions = WeightVersions(
            axes.pp,
            plan,
            stages,
            lambda flat: ScheduledOptimizer(job, flat),
            tied=tied,
            reduction=config.reduction,
            keep_gradients=self.keeps_gradients,
        )
        # On a separate communicator: receives are posted ahead while others use that of the axis between two steps.
        self.pipe = VersionedPipeline(
            axes.pp.dup(),
            plan,
            stages,
            job.loss_of,
            versions=self.versions,
            coordinates=lambda i: job.coordinates(*self._place(i)),
            period=period_of(config, job.batches.accumulation),
        )
        self.stream = Stream(self.pipe, job.batches.accumulation)
        self.forward_pipe: Evaluation | None = None  # for evaluations
        self.parts: tuple[MicroBatches, MicroBatches] | None = None  # inputs and targets

        # By the micro-batches that an update takes, of all stages: the updates before this stream.
        self.updates_before = dict.fromkeys(self.versions.rounds_of_plan(), 0)
        self.counts_loaded = False
        self.first = 0  # step of the stream
        super().__init__(job, axes, list(self._data_axes()))

    def _data_axes(self) -> Iterable[UnitAxis]:
        holders = self.pipe.plan.holders()
        for stage, units in self.versions.units.items():
            replica = ReplicaId(holders[stage].index(self.pipe.comm.rank), len(holders[stage]))
            for unit in units:
                size = self.versions.round_of(stage, unit)
                yield UnitAxis(unit, stage, replica, partial(self._updates_after, size))

    def _updates_after(self, size: int, saved: int) -> int:
        """Return the updates of a checkpoint. saved: those of a job with other counts, where all parameters had one."""
        if not self.counts_loaded:
            self.updates_before = dict.fromkeys(self.updates_before, saved)
        return self.updates_before[size]

    def _updates_made(self) -> dict[int, int]:
        """Return the updates by now, by the micro-batches that one takes; the last one of a stream may take fewer."""
        done, ended = self.stream.done, self.stream.done == self.stream.count
        return {
            size: before + (-(-done // size) if ended else done // size) for size, before in self.updates_before.items()
        }

    # --- the phases of a step -----------------------------------------------------------------------------------------

    def steps_read(self, done: int) -> Iterable[int]:
        """Return the steps of this rank's micro-batches: a replica takes its turn in every stream."""
        turn, replicas = self.stream.turn, self.stream.stride
        return (step for steps in streams(self.job.config, done) for step in steps[turn::replicas])

    def zero_grad(self) -> None:
        """Leave the gradients alone: every update clears its own, and others are on their way."""

    def forward_backward(self, step: int) -> list[float]:
        job, k = self.job, self.job.batches.accumulation
        if self.stream.done == self.stream.count:
            self.updates_before = self._updates_made()
            self.first, count = step, k * (stream_end(job.config, step) - step)
            # Made once: their shapes are those of every stream.
            if self.parts is None:
                self.parts = self._part(0), self._part(1)
            self.stream.begin(*self.parts, count)
        return self.stream.advance()

    def data_copy(self) -> int | None:
        # All ranks share one copy: first stages read inputs, last stages targets, the replicas of a stage in turn.
        return 0 if self.stream.done == self.stream.count else None

    def step(self, lr_factor: float) -> None:
        """Do nothing: the stream has made its updates, each with the learning rate of that update's number."""

    def held_out_losses(self, job: Job) -> list[float]:
        # Every replica takes a micro-batch, so some are computed again where there are fewer than paths.
        k = self.job.batches.accumulation
        period = period_of(job.config, k)
        count = -(-k // period) * period
        if self.forward_pipe is None:
            self.forward_pipe = Evaluation(self.pipe, self.job.loss_of, count)
        return self.forward_pipe.step(*input_arrays(job, [(0, i % k) for i in range(count)]))[:k]

    # --- the micro-batches --------------------------------------------------------------------------------------------

    def _place(self, i: int) -> tuple[int, int]:
        """Return the step, and the number in it, of micro-batch i of the stream."""
        step, number = divmod(i, self.job.batches.accumulation)
        return self.first + step, number

    def _part(self, index: int) -> MicroBatches:
        """Return the inputs (0) or the targets (1) of the stream, each micro-batch read when a stage needs it."""

        def read(job: Job, i: int) -> Any:
            return input_arrays(job, [self._place(i)], SIDES[index : index + 1])[index][0]

        # Those of the first step are read for their shapes alone.
        period = period_of(self.job.config, self.job.batches.accumulation)
        unused = replace(self.job, extensions=())
        first = [read(unused, i) for i in range(period)]
        return MicroBatches(partial(read, self.job), self.pipe.plan.microbatches, first)

    # --- what this rank holds -----------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        return max(self._updates_made().values())

    def gradients(self) -> list[Array]:
        return []

    def optimizer_state(self) -> dict[str, dict[str, Array]]:
        result: dict[str, dict[str, Array]] = {}
        for units in self.versions.units.values():
            for unit in units:
                result.update(unit.optimizer.state)
        return result

    def local_arrays(self) -> list[Array]:
        return [unit.weights for units in self.versions.units.values() for unit in units]

    def owns(self, axis: DataAxis, parameter: Any) -> bool:
        """Return whether the axis has the first stage of a parameter, which writes it to a checkpoint."""
        places = [
            place for group in self.versions.shared.groups if parameter.name in group.names for place in group.places
        ]
        return axis.stage == min((stage for stage, _ in places), default=axis.stage)

    def sizes(self) -> list[AxisSizes]:
        return [_sizes(stage, units, self.versions.rounds.get(stage)) for stage, units in self.versions.units.items()]

    def tensors(self) -> Tensors:
        """Return the latest weights and optimizer state of all stages, and the gradients of the updates to them."""
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for units in self.versions.units.values():
            for unit in units:
                # Before the first update there is no gradient.
                gradient = unit.gradient
                if gradient is None and self.keeps_gradients:
                    gradient = xp.zeros_like(unit.weights)
                add_record(result, unit.flat, unit.weights, gradient, unit.optimizer.state)
        return gather_tensors(self.axes.pp, result)

    # --- numbers in a checkpoint --------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        return {f"updates.{size}": float(number) for size, number in self._updates_made().items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        found = {size: scalars.get(f"updates.{size}") for size in self.updates_before}
        self.counts_loaded = None not in found.values()
        if self.counts_loaded:
            self.updates_before = {size: int(number) for size, number in found.items() if number is not None}


def _sizes(stage: int, units: list[UnitVersions], rounds: GradientReducer | None) -> AxisSizes:
    """Return the element counts of a stage; no part of it lies on a data axis. rounds: the reducer of its replicas."""
    reduced = None
    if rounds is not None and rounds.algorithm not in ("ring", "ordered"):
        reduced = reduced_elements.of_reducer(rounds)
    trainable = {p.name: p.size for versions in units for p in versions.flat.parameters if p.requires_grad}
    return AxisSizes(stage, False, [versions.flat.padded_numel for versions in units], [], trainable, reduced=reduced)


def add_record(
    tensors: Tensors, flat: FlatParameters, weights: Array, gradient: Array | None, state: dict[str, dict[str, Array]]
) -> None:
    """Add copies of a unit's parameters to `tensors` by name; of a shared parameter's replicas the first is kept."""
    for parameter in flat.parameters:
        place = flat.slice_of(parameter)
        tensors["weights"].setdefault(parameter.name, xp.array(weights[place].reshape(parameter.shape)))
        if parameter.requires_grad and gradient is not None:
            tensors["gradients"].setdefault(parameter.name, xp.array(gradient[place].reshape(parameter.shape)))
    for name, arrays in state.items():
        for key, array in arrays.items():
            tensors["optimizer"].setdefault(f"{name}.{key}", xp.array(array))
