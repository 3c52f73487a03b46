"""A job's parallelism: from its settings to what `core/train/parallelize.py` applies.

    settings     ParallelLayout   the degree of each axis, and how each works
                 options          arguments of what wraps the model on the data axis, which techniques give
                 Parts            the classes of strategies and data axes that a job has in place of the core's

Proved by: tests/train/test_axes.py, tests/train/test_pipelines.py, tests/train/test_sharded.py
"""

from dataclasses import replace
from functools import partial
from typing import Any

from minidist.core.comm import Comm
from minidist.core.train import parallelize as core
from minidist.core.train.task import ParallelLayout
from minidist.job.config.train_config import TrainConfig, has_ragged_shares
from minidist.job.train.job import Job, build, mesh_of
from minidist.job.train.strategies.data_axis import Replicated
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.replicas_alone import ReplicaAlone, ShardedReplicaAlone, ZeroReplicaAlone
from minidist.job.train.strategies.sharded import FullySharded, ShardedOptimizer

# The data axes of a job by the stage of ZeRO: of replicas that make every step together, or that train alone.
TOGETHER = (Replicated, ShardedOptimizer, ShardedOptimizer, FullySharded)
ALONE = (ReplicaAlone, ZeroReplicaAlone, ZeroReplicaAlone, ShardedReplicaAlone)


def parallelize(job: Job, comm: Comm) -> MeshStrategy:
    """Apply every axis to the job's model and return this rank's strategy. All ranks of `comm` call it.

    See `train.parallelize.parallelize` for the order and the messages.
    """
    config = job.config
    layout = ParallelLayout(
        **vars(job.batches.dims),
        zero=config.zero,
        reduction=config.reduction,
        schedule=config.schedule,
        chunks=config.chunks,
        attention=config.attention,
        ulysses=config.ulysses,
        sequence_parallel=config.sequence_parallel,
    )
    strategy: MeshStrategy = core.parallelize(job, comm, layout, parts_of(job))
    return strategy


def parts_of(job: Job) -> core.Parts:
    """Return what the job's settings choose: classes, and what is left open."""
    config = job.config
    pipeline: type[MeshStrategy] = MeshStrategy
    if config.pp > 1:
        from minidist.job.train.strategies.pipeline import PipelineParallel

        pipeline = PipelineParallel

    # Ranks with different numbers of rows have to agree on the experts' slots.
    expert_style = None
    if config.experts and has_ragged_shares(config, job.batches):
        from minidist.parallel.expert.ragged import RaggedExpertParallel

        expert_style = RaggedExpertParallel()

    options: dict[str, Any] = {}
    alone = sums_buckets = False
    for extension in job.extensions:
        options |= extension.wrapper_options(config)
        pipeline = extension.pipeline() or pipeline
        alone |= extension.trains_alone
        sums_buckets |= extension.sums_buckets
    return core.Parts(
        MeshStrategy,
        pipeline,
        ALONE if alone else TOGETHER,
        options,
        partial(mesh_of, copies=config.dp_replicate),
        expert_style,
        sums_buckets,
    )


def rebuild(job: Job, comm: Comm, config: TrainConfig) -> MeshStrategy:
    """Return the strategy of a job with other settings, and with the initial weights, while `job` trains.

    The model is new. What does not belong to it stays: data, batches and extensions.
    """
    fresh = build(config, job.batches, comm, job.plan)
    fresh = replace(fresh, sampler=job.sampler, plan=job.plan, batch=job.batch, observers=job.observers)
    fresh = replace(fresh, extensions=job.extensions, profile=job.profile)
    return parallelize(fresh, comm)
