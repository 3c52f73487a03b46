"""The recipe: every kind of parallelism, applied to one model in a fixed order, on one page.

    1  experts       expert parallel: each rank has some of them
    2  layers        tensor (and sequence) parallel: each rank keeps its shards of every matrix, its experts' too
    3  sequences     context parallel: each rank has a part of every sequence; attention exchanges keys and values
    4  activations   recomputed in backward instead of kept
    5  stages        the model cut into a pipeline
    6  data          each copy of a stage trains on its own rows: DDP; ZeRO and FSDP also shard the copies

Every rank builds the whole model from the seed and keeps its part, so all parts together are the model of one device;
that is why a tensor-parallel plan can use the whole model's names although the model is cut into stages later.

Gradients are finished from the inside outwards: shards and norms while backward runs (2, 3), then replicas of a tied
weight on two stages (5), then the data axis (6), then clip, then step; with ZeRO 2 and 3 the data axis comes first, in
every micro-batch, and the shards of the tied weight last.

Proved by: tests/train/test_axes.py, tests/train/test_pipelines.py, tests/train/test_sharded.py
"""

from collections.abc import Collection
from dataclasses import replace

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.comm import Comm
from minidist.job.config.models import activation_shape
from minidist.job.config.train_config import TrainConfig, updates_of
from minidist.job.train.job import Job, build
from minidist.job.train.strategies.asynchronous_pipeline import AsynchronousPipeline
from minidist.job.train.strategies.data_axis import DataAxis, Group
from minidist.job.train.strategies.data_parallel import ReplicaAlone, Replicated
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.pipeline import PipelineParallel
from minidist.job.train.strategies.sharded import FullySharded, ShardedOptimizer
from minidist.nn import Module
from minidist.nn.recompute import recompute
from minidist.parallel.dims import Axes
from minidist.parallel.model_parallel import (
    apply_context_parallel,
    apply_expert_parallel,
    apply_tensor_parallel,
    use_positions,
)
from minidist.parallel.sync_batch_norm import convert_sync_batchnorm


def parallelize(job: Job, comm: Comm) -> MeshStrategy:
    """Apply every axis to the job's model and return this rank's strategy. All ranks of `comm` call it.

    Sends the weights of rank 0 along the data axis (purpose startup); in a pipeline also what `Pipeline` sends at its
    start.
    """
    config, axes = job.config, job.batches.dims.axes(comm)

    # 1, before tensor parallelism: the experts that a rank keeps are sharded by it, too.
    if axes.ep.size > 1:
        job.model = apply_expert_parallel(job.model, axes.ep, job.expert_style)

    # 2, before parameters become flat arrays (6): a flat array is laid out once, from the shards.
    if axes.tp.size > 1:
        job.model = apply_tensor_parallel(job.model, axes.tp, config.sequence_parallel)
        if config.is_language_model:
            job.model.loss_fn = job.loss_function(job.model.loss_fn, axes.tp)

    # 3, after tensor parallelism, which decides how many heads a rank's attention has.
    if axes.cp.size > 1:
        job.positions = apply_context_parallel(job.model, axes.cp, config.context, config.attention, config.ulysses)
    # A stage that holds 1/tp of the sequence needs the angles of all of it.
    elif config.model == "llama":
        use_positions(job.model, xp.device_arange(config.context))

    # 4, after everything that sends inside a layer: recomputing a block must repeat its messages.
    apply_activation_checkpointing(job)

    # Batch norms over the data axis, which exchange statistics inside their forward and backward.
    if config.batch_norm == "sync":
        convert_sync_batchnorm(job.model, axes.data)

    # 5 and 6, last, and stage by stage: no unit of a reduction or of a shard crosses a stage.
    if axes.pp.size == 1:
        return MeshStrategy(job, axes, apply_data_parallel(job, job.model, axes))
    if updates_of(config.schedule) == "flush":
        return PipelineParallel(job, axes, apply_data_parallel)
    return AsynchronousPipeline(job, axes)


def rebuild(job: Job, comm: Comm, config: TrainConfig) -> MeshStrategy:
    """Return the strategy of a job with other settings, and with the initial weights, while `job` trains.

    The model is new. What does not belong to it stays: data, batches and extensions.
    """
    fresh = build(config, job.batches, comm, job.plan)
    fresh = replace(fresh, sampler=job.sampler, batch=job.batch, keep_gradients=job.keep_gradients)
    fresh = replace(fresh, extensions=job.extensions, profile=job.profile)
    return parallelize(fresh, comm)


def apply_activation_checkpointing(job: Job) -> None:
    """Apply 4: blocks keep only their input (full), or segments of blocks do (sqrt, budget), or attention (selective).

    A pipeline's plan runs a whole stage's forward again, so with `full` nothing inside the stage is recomputed, unless
    a technique keeps the blocks' inputs elsewhere.
    """
    config = job.config
    # A technique may let the kept inputs wait elsewhere.
    pack = next((extension.pack for extension in job.extensions if extension.packs_inputs()), None)
    if config.pp == 1 or config.recompute == "selective" or pack is not None:
        # The shape of a block's input on this rank, from which a budget follows.
        rows = config.context if job.positions is None else len(job.positions)
        rows //= config.tp if config.sequence_parallel else 1
        shape = activation_shape(config, job.sampler.dataset) if config.is_classifier else (rows, config.width)
        buffers = dict(job.model.named_buffers())
        recompute(job.model, config.recompute, pack, (job.batches.micro_batch, *shape), job.dtype)

        # A budget measures a block by running it, which is not a part of the training.
        for extension in job.extensions:
            extension.forget()
        job.model.load_state_dict(buffers, strict=False)


def apply_data_parallel(
    job: Job,
    module: Module,
    axes: Axes,
    *,
    stage: int = 0,
    reduction: str | None = None,
    tied: Collection[str] = (),
    manual_sync: bool = False,
) -> list[DataAxis]:
    """Apply 6 and return the data axes of a stage; sends the weights of rank 0 (purpose startup).

    There is one, or two with distributed experts. reduction: another algorithm than the job's. tied, manual_sync: see
    `Group`.
    """
    config = job.config

    # Parameters with the same replicas, and the same cut, are one group.
    groups: dict[str, list[Parameter]] = {"shared": [], "tied": [], "experts": []}
    for parameter in module.parameters():
        if parameter.layout is not None and "ep" in parameter.layout.axes:
            groups["experts"].append(parameter)
        # Where a sum depends on the whole bucket, both stages must have a tied weight in equal ones.
        elif parameter.name in tied and (config.zero == 2 or any(each.sums_buckets for each in job.extensions)):
            groups["tied"].append(parameter)
        else:
            groups["shared"].append(parameter)

    # How the ranks of a group share it: whole replicas, a sharded optimizer, or sharded parameters.
    alone = any(extension.trains_alone for extension in job.extensions)
    kinds = {0: ReplicaAlone if alone else Replicated, 1: ShardedOptimizer, 2: ShardedOptimizer}
    kind = kinds.get(config.zero, FullySharded)
    # An expert has replicas on fewer ranks than the other parameters. In a pipeline each group has a communicator of
    # its own: the reductions of several stages may be in flight at one time.
    comms = {name: axes.expert_data if name == "experts" else axes.data for name, found in groups.items() if found}
    if config.pp > 1:
        comms = {name: comm.dup() for name, comm in comms.items()}
    result: list[DataAxis] = []
    for name, parameters in groups.items():
        if parameters:
            # The second axis wraps the model that the first one returned.
            group = Group(
                result[-1].model if result else module,
                parameters,
                comms[name],
                reduction or config.reduction,
                stage,
                name == "experts",
                tied,
                manual_sync,
                {"tp": axes.tp, "ep": axes.ep} if name == "experts" else {"tp": axes.tp},
                comms.get("experts"),
            )
            result.append(kind(job, group))
    return result
