"""Data axes on which every rank holds all parameters.

                      parameters    gradients     optimizer
    Replicated        everywhere    everywhere    everywhere      data parallelism
    LocalSteps        everywhere    its own       its own         local SGD
    StreamingSteps    its own       its own       its own         Streaming DiLoCo; the common weights are everywhere

Proved by: tests/equality/test_equality.py, tests/train/test_local_steps.py, tests/train/test_compression.py,
tests/train/test_streaming_diloco.py
"""

from contextlib import AbstractContextManager
from dataclasses import replace

from minidist.base import arrays as xp
from minidist.base.trace import purpose
from minidist.collectives import broadcast
from minidist.comm import Comm
from minidist.job.checkpoint.directory import ReplicaId
from minidist.job.checkpoint.parameter_shards import LocalShard
from minidist.job.train.job import Job, make_optimizer
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis, Group, Replicas, Tensors
from minidist.nn.flat import FlatParameters
from minidist.parallel import DistributedDataParallel
from minidist.parallel.compression import compress, make_compressor
from minidist.parallel.data_parallel import check_same_model
from minidist.parallel.local_sgd import OuterOptimizer, PeriodicModelAverager
from minidist.parallel.streaming_diloco import StreamingOuterOptimizer


class Replicated(DataAxis):
    """Data parallelism: gradients are all-reduced, and every rank makes the same update."""

    def __init__(self, job: Job, group: Group) -> None:
        config, flat = job.config, FlatParameters(group.parameters)
        optimizer = make_optimizer(job, flat, group.exchange(config, replicas=group.comm))
        self.parallel = DistributedDataParallel(
            group.module,
            group.comm,
            reduction="sum",
            flat=flat,
            algorithm=group.reduction,
            bucket_cap_mb=config.bucket_cap_mb,
        )
        # A pipeline starts the reductions itself, when a stage has its last gradient.
        if group.manual_sync:
            self.parallel.reducer.synchronize_manually()

        compressor = None
        # The compressor takes the place of each bucket's all-reduce.
        if config.compression != "none":
            compressor = make_compressor(config.compression, group.comm, "sum", config.seed)
            self.parallel.register_comm_hook(compressor, compress)

        super().__init__(
            [flat],
            optimizer,
            model=self.parallel,
            stage=group.stage,
            experts=group.experts,
            reducers=[self.parallel.reducer],
            replicas=self.replicas_on(group.comm),
            compressor=compressor,
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.parallel.no_sync()

    def replicas_on(self, comm: Comm) -> Replicas:
        replica = ReplicaId(comm.rank, comm.size)
        return Replicas(replica, replica)


class LocalSteps(DataAxis):
    """Local SGD: each rank steps with its own rows' gradient; weights are averaged every H steps and at the end.

    A checkpoint follows an average, so its weights are those of all replicas; optimizer state is stored by replica.
    Replicas with different numbers of rows count in proportion to them.
    """

    def __init__(self, job: Job, group: Group) -> None:
        flat = FlatParameters(group.parameters)
        super().__init__(
            [flat],
            make_optimizer(job, flat, group.exchange(job.config)),
            model=group.module,
            stage=group.stage,
            replicas=self.replicas_on(group.comm),
        )
        self.flat, self.comm, self.last = flat, group.comm, job.config.steps
        check_same_model(flat, group.comm, "local SGD", {"local_steps": job.config.local_steps})
        shares = job.batch.shares
        rows = sum(shares.rows[group.comm.rank])
        self.factor = shares.samples / rows
        self.average = PeriodicModelAverager(
            flat,
            group.comm,
            job.config.local_steps,
            algorithm=group.reduction,
            module=group.module,
            share=None if shares.is_even else rows / shares.samples,
        )
        if isinstance(self.optimizer, OuterOptimizer):
            self.optimizer.begin_round()

    def step(self) -> None:
        # The loss was divided by the rows of all ranks, and this gradient is of one rank's rows.
        self.flat.grad[...] *= self.flat.dtype.type(self.factor)
        self.optimizer.step()

        # The last step ends with an average too, where H does not divide the number of steps. A resumed job begins
        # after an average, and its optimizer has counted the steps before.
        averaged = self.average.step()
        if not averaged and self.optimizer.step_count == self.last:
            self.average.average()
            averaged = True
        if averaged and isinstance(self.optimizer, OuterOptimizer):
            self.optimizer.outer_step()

        # An offloaded optimizer steps copies on the host, which must be the new weights, too.
        if averaged and hasattr(self.optimizer, "refresh"):
            self.optimizer.refresh()

    def replicas_on(self, comm: Comm) -> Replicas:
        return _alone(comm)


class StreamingSteps(DataAxis):
    """Streaming DiLoCo: replicas train alone, and fragments of their weights meet the common ones in turn.

    The model is the common weights, which a checkpoint holds; a replica's own ones are a part of its optimizer state.
    """

    def __init__(self, job: Job, group: Group) -> None:
        config, flat, comm, shares = job.config, FlatParameters(group.parameters), group.comm, job.batch.shares
        check_same_model(flat, comm, "Streaming DiLoCo", {"local_steps": config.local_steps})
        with purpose("startup"):
            broadcast(comm, flat.data)
        rows = sum(shares.rows[comm.rank])
        self.factor, self.last = shares.samples / rows, config.steps
        self.outer = StreamingOuterOptimizer(
            make_optimizer(job, flat, group.exchange(config)),
            flat,
            comm,
            config.local_steps,
            config.outer_fragments,
            config.outer_delay,
            config.outer_mixing,
            config.outer_lr,
            config.outer_momentum,
            algorithm=group.reduction,
            share=None if shares.is_even else rows / shares.samples,
        )
        super().__init__([flat], self.outer, model=group.module, stage=group.stage, replicas=self.replicas_on(comm))

    def step(self) -> None:
        # The loss was divided by the rows of all ranks, and this gradient is of one rank's rows.
        flat = self.flats[0]
        flat.grad[...] *= flat.dtype.type(self.factor)
        self.outer.step()

        # What is on its way at the end would never be received.
        if self.outer.step_count == self.last:
            self.outer.wait()

    def replicas_on(self, comm: Comm) -> Replicas:
        return _alone(comm)

    def weights(self) -> list[LocalShard]:
        flat = self.flats[0]
        return [LocalShard(p, self.outer.common[flat.slice_of(p)], 0, p.size) for p in self.parameters]

    def tensors(self) -> Tensors:
        """Add the common weights to the optimizer state; the weights are this replica's own."""
        tensors = super().tensors()
        common = {f"{shard.parameter.name}.common": xp.array(shard.values) for shard in self.weights()}
        return {**tensors, "optimizer": {**tensors["optimizer"], **common}}

    def sizes(self) -> AxisSizes:
        return replace(super().sizes(), fragments=tuple(part.stop - part.start for part in self.outer.fragments))


def _alone(comm: Comm) -> Replicas:
    """Return the replicas of a rank that steps alone: weights that all ranks have, and optimizer state of its own."""
    return Replicas(ReplicaId(comm.rank, comm.size), prefix=f"replica/{comm.rank:05d}/")
