"""Bugs of data, from public threads of 2024 to 2026: samples that are read twice in an epoch, or never.

No tensor has a wrong shape and no loss looks wrong. What finds them is a ledger of the samples that all ranks have
read (`--check-data`).

Proved by: tests/museum/test_recent.py
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.course.museum import data_jobs
from minidist.course.museum.exhibit import Patch, replaces
from minidist.data import sampler as samplers
from minidist.data.sampler import GlobalBatchSampler
from minidist.job import checkpoint
from minidist.job.checkpoint import resume
from minidist.job.train import recipe, trainer
from minidist.job.train.job import Job, build


class Displaced(GlobalBatchSampler):
    """A sampler that reads `by` places further in the endless list of samples than it is asked to."""

    def __init__(self, sampler: Any, by: int) -> None:
        super().__init__(sampler.dataset, sampler.global_batch, sampler.context, sampler.seed)
        self.by = by

    def _indices(self, places: np.ndarray) -> np.ndarray:
        return super()._indices(places + self.by)


def displace_resumed(patch: Patch, by: Callable[[int, Any, int], int]) -> None:
    """Let a resumed job read on from another place; by: (samples read before, its sampler, its replicas) -> places."""

    def resume_job(directory: Any, job: Any, strategy: Any) -> Any:
        done, losses = resume.resume_job(directory, job, strategy)
        job.sampler = Displaced(job.sampler, by(done * job.sampler.global_batch, job.sampler, strategy.axes.dp.size))
        return done, losses

    patch.setattr(checkpoint, "resume_job", resume_job)


def place_from_steps(patch: Patch) -> None:
    """the batch grows with the ranks, and a resumed job goes on at its steps times the batch that it has now"""
    right = resume.same_job

    def any_batch(checkpoint: Any, job: Any, rank: int = 0) -> Any:
        batches = SimpleNamespace(global_batch=resume.read_job_state(checkpoint).global_batch)
        same = SimpleNamespace(config=job.config, batches=batches, data_digest=job.data_digest, extensions=())
        return right(checkpoint, same, rank)

    patch.setattr(resume, "same_job", any_batch)
    patch.setattr(data_jobs, "global_batch_on", lambda ranks: 2 * ranks)


def epoch_from_zero(patch: Patch) -> None:
    """the sampler of a resumed job begins with epoch 0, in whose order it skips what was read of the epoch"""
    displace_resumed(patch, lambda read, sampler, ranks: -(read // sampler.samples) * sampler.samples)


def one_batch_behind(patch: Patch) -> None:
    """a resumed job begins one batch too early"""
    displace_resumed(patch, lambda read, sampler, ranks: -sampler.global_batch)


def pending_sample_lost(patch: Patch) -> None:
    """a sample that was taken from the data, and not yet returned, is not in the saved position"""
    displace_resumed(patch, lambda read, sampler, ranks: 1)


def skip_divided_by_ranks(patch: Patch) -> None:
    """all ranks together skip as many samples as each of them should"""
    displace_resumed(patch, lambda read, sampler, ranks: read // ranks - read)


def shuffled_again(patch: Patch) -> None:
    """each epoch shuffles the order of the epoch before; a resumed job shuffles the data as they were"""
    # Here, so that the other exhibits run in a package without this technique.
    from minidist.techniques.data_ledger import ledger as data_ledger

    right = samplers.permutation
    has_resumed = False

    def order(seed: int, epoch: int, *size: int) -> np.ndarray:
        result = right(seed, epoch, *size)
        for earlier in reversed(range(0 if has_resumed else epoch)):
            result = right(seed, earlier, *size)[result]
        return result

    def note(config: Any, *arguments: Any) -> Any:
        nonlocal has_resumed
        has_resumed = config.resume
        return build(config, *arguments)

    patch.setattr(trainer, "build", note)
    for module in (samplers, data_ledger):
        patch.setattr(module, "permutation", order)


def same_order_every_epoch(patch: Patch) -> None:
    """every epoch has the order of the first one"""
    right = samplers.permutation
    patch.setattr(samplers, "permutation", lambda seed, epoch, *size: right(seed, 0, *size))


@replaces(Job, "micro_batch")
def all_ranks_read_alike(right: Any, self: Any, step: int, number: int, *sides: Any) -> Any:
    """the loader does not know its rank: every replica reads the rows of the first one"""
    return right(self, step, number % self.batch.shares.accumulation, *sides)


def every_process_reads_others(patch: Patch) -> None:
    """batches are dealt out to all processes, also to those that split a layer and need the same one"""

    class DealtOut(GlobalBatchSampler):
        def __init__(self, sampler: Any, rank: int, ranks: int) -> None:
            super().__init__(sampler.dataset, sampler.global_batch, sampler.context, sampler.seed)
            self.rank, self.ranks = rank, ranks

        def sample_indices(self, step: int, *rows: Any) -> np.ndarray:
            return super().sample_indices(step * self.ranks + self.rank, *rows)

    def parallelize(job: Any, comm: Any, *rest: Any) -> Any:
        job.sampler = DealtOut(job.sampler, comm.rank, comm.size)
        return recipe.parallelize(job, comm, *rest)

    patch.setattr(trainer, "parallelize", parallelize)
