"""Every kind of parallelism, applied to one model in a fixed order, and the training loop, on one page.

    1  experts       expert parallel: each rank has some of them
    2  layers        tensor (and sequence) parallel: each rank keeps its shards of every matrix, its experts' too
    3  sequences     context parallel: each rank has a part of every sequence; attention exchanges keys and values
    4  the task      may change the layers: recompute activations, synchronize norms (`Task.layers_split`)
    5  stages        the model cut into a pipeline
    6  data          each copy of a stage trains on its own rows: DDP; ZeRO and FSDP also shard the copies

Every rank builds the whole model from the seed and keeps its part, so all parts together are the model of one device;
that is why a tensor-parallel plan can use the whole model's names although the model is cut into stages later.

Gradients are finished from the inside outwards: shards and norms while backward runs (2, 3), then replicas of a tied
weight on two stages (5), then the data axis (6); with ZeRO 2 and 3 the data axis comes first, in every micro-batch.

The loop is the same code on one rank, on simulated ranks and in MPI processes; strategy.py has the phases of its step.

Proved by: tests/train/test_core_runs.py, tests/train/test_axes.py, tests/train/test_pipelines.py,
tests/equality/test_equality.py
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base import hooks
from minidist.core.comm import Comm, Mesh, check_communicator
from minidist.core.nn import Module
from minidist.core.parallel.dims import Axes
from minidist.core.parallel.model_parallel import apply_context_parallel, apply_expert_parallel, apply_tensor_parallel
from minidist.core.train.data_axis import DataAxis, FullySharded, Group, Replicated, ShardedOptimizer
from minidist.core.train.strategy import PipelineStrategy, Strategy
from minidist.core.train.task import ParallelLayout, Task, global_loss


@dataclass(frozen=True)
class Parts:
    """What `parallelize` makes: the classes of strategies, and of data axes by the stage of ZeRO.

    options: further arguments of what wraps the model on a data axis. mesh_of: over what ZeRO 3 shards on some ranks.
    expert_style: in the place of `ExpertParallel`. sums_buckets: whether the sum of a gradient depends on the others in
    its bucket.
    """

    strategy: type[Any] = Strategy
    pipeline: type[Any] = PipelineStrategy
    data: tuple[type[Any], ...] = (Replicated, ShardedOptimizer, ShardedOptimizer, FullySharded)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh_of: Callable[[Comm], Comm | Mesh] = lambda comm: comm
    expert_style: Any = None
    sums_buckets: bool = False


def parallelize(task: Task, comm: Comm, layout: ParallelLayout, parts: Parts = Parts()) -> Any:
    """Apply every axis to the task's model and return this rank's strategy. All ranks of `comm` call it (startup)."""
    check_communicator(comm, "parallelize")
    if not (isinstance(task, Task) and isinstance(layout, ParallelLayout)):
        hooks.wrong_arguments().refuse_parallelize(task, layout)
    axes = layout.axes(comm)

    # 1, before tensor parallelism: the experts that a rank keeps are sharded by it, too.
    if axes.ep.size > 1:
        task.model = apply_expert_parallel(task.model, axes.ep, parts.expert_style)

    # 2, before parameters become flat arrays (6): a flat array is laid out once, from the shards.
    if axes.tp.size > 1:
        task.model = apply_tensor_parallel(task.model, axes.tp, layout.sequence_parallel)

    # 3, after tensor parallelism, which decides how many heads a rank's attention has.
    if axes.cp.size > 1:
        task.positions = apply_context_parallel(task.model, axes.cp, task.context, layout.attention, layout.ulysses)

    # 4, after everything that sends inside a layer: recomputing a block must repeat its messages.
    task.layers_split(axes)

    # 5 and 6, last, and stage by stage: no unit of a reduction or of a shard crosses a stage.
    data_axes = partial(apply_data_parallel, task, axes, layout, parts)
    if axes.pp.size > 1:
        return parts.pipeline(task, axes, layout, data_axes)
    return parts.strategy(task, axes, data_axes(task.model))


def apply_data_parallel(
    task: Task,
    axes: Axes,
    layout: ParallelLayout,
    parts: Parts,
    module: Module,
    *,
    stage: int = 0,
    tied: Collection[str] = (),
) -> list[DataAxis]:
    """Apply 6 and return the data axes of a stage: one, or two with distributed experts.

    stage: its number in a pipeline; tied: the names of parameters that other stages have too.
    """
    # Where a sum depends on the whole bucket, both stages must have a tied weight in equal ones.
    groups = grouped(module.parameters(), tied if layout.zero == 2 or parts.sums_buckets else ())

    # An expert has replicas on fewer ranks than the other parameters. In a pipeline each group has its own
    # communicator: the reductions of several stages may be in flight at one time.
    comms = {name: axes.expert_data if name == "experts" else axes.data for name in groups}
    if axes.pp.size > 1:
        comms = {name: comm.dup() for name, comm in comms.items()}
    meshes = {name: parts.mesh_of(comm) if layout.zero == 3 else comm for name, comm in comms.items()}
    more = {"expert_mesh": meshes["experts"]} if layout.zero == 3 and "experts" in meshes else {}

    # The replicas of a tied weight lie in other places of other arrays: only this order gives both the same bits.
    reduction = "ordered" if any(p.name in tied for p in module.parameters()) else layout.reduction
    result: list[DataAxis] = []
    for name, parameters in groups.items():
        # The second axis wraps the model that the first one returned.
        model = result[-1].model if result else module
        group = Group(
            model,
            parameters,
            comms[name],
            meshes[name],
            axes=axes,
            zero=layout.zero,
            reduction=reduction,
            stage=stage,
            tied=tied,
            experts=name == "experts",
            options={**parts.options, **more},
        )
        result.append(parts.data[layout.zero](task, group))
    return result


def grouped(parameters: Iterable[Parameter], apart: Collection[str]) -> dict[str, list[Parameter]]:
    """Return the parameters by group: those with the same replicas, and the same cut. apart: names of a group."""
    groups: dict[str, list[Parameter]] = {"shared": [], "tied": [], "experts": []}
    for parameter in parameters:
        if parameter.layout is not None and "ep" in parameter.layout.axes:
            groups["experts"].append(parameter)
        else:
            groups["tied" if parameter.name in apart else "shared"].append(parameter)
    return {name: found for name, found in groups.items() if found}


class Loop:
    """The training of a strategy that `parallelize` has made: `Loop(strategy).train(range(20))` on every rank.

    What a subclass adds stands between the parts of a step. It may change `strategy` between two steps.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy, self.losses = strategy, list[float]()

    def train(self, steps: Iterable[int]) -> list[float]:
        """Train for these steps, and return the losses. All ranks call it.

        In addition to what the strategy sends, each rank sends its micro-batches' losses (8 B each, purpose metrics).
        """
        for step in steps:
            self.before_step(step)
            self.strategy.zero_grad()
            parts = self.strategy.forward_backward(step)
            self.after_forward_backward(step)
            self.losses.append(global_loss(self.strategy.axes.data, parts))
            if self.is_updated(step):
                self.strategy.update(step)
            self.after_step(step)
        return self.losses

    def before_step(self, step: int) -> None:
        """Prepare a step."""

    def after_forward_backward(self, step: int) -> None:
        """Note that this rank has made its micro-batches; losses are not exchanged yet."""

    def is_updated(self, step: int) -> bool:
        """Return whether the update is made, the same on every rank; gradients are summed."""
        return True

    def after_step(self, step: int) -> None:
        """Note that the step has ended."""
