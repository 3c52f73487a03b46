"""Bugs of memory: what is sharded, freed, recomputed or saved.

Proved by: tests/museum/test_museum.py
"""

from contextlib import nullcontext
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

from minidist import parallel
from minidist.core.autograd import Parameter, Tensor
from minidist.core.parallel.fsdp import FSDPUnit
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch, Recording, replaces
from minidist.job import checkpoint
from minidist.job.checkpoint import resume
from minidist.job.train.strategies import sharded
from minidist.nn.ops.in_place import SampledTensor
from minidist.optim import block_square_sums, clip_by_norm_, norm_from_blocks
from minidist.parallel import overflow, shards
from minidist.parallel import zero as parallel_zero


def norm_of_the_shard(patch: Patch) -> None:
    """each rank clips by the norm of what it owns"""

    def clip(comm: Any, parts: Any, limit: float, *_: Any) -> None:
        for part in parts:
            clip_by_norm_(part, norm_from_blocks(block_square_sums(part.grad)), limit)

    patch.setattr(parallel_zero, "clip_shards_", clip)
    patch.setattr(sharded, "shard_square_sums", lambda comm, parts, skip: block_square_sums(parts[0].grad))


@replaces(shards, "all_gather")
def norm_counted_once_per_rank(right: Any, comm: Any, array: Any, **keywords: Any) -> Any:
    """every rank contributes the squares of the same shard"""
    whole = right(comm, array, **keywords)
    return whole if array.dtype.itemsize == 4 else whole.reshape(comm.size, -1)[[0] * comm.size].reshape(-1)


def new_mask(patch: Patch) -> None:
    """the replay continues to count random draws where the forward stopped"""
    module = import_module("minidist.nn.ops.checkpoint")  # the package has a function of that name
    patch.setattr(module, "replay_calls", lambda calls: nullcontext())


def overflow_of_the_shard(patch: Patch) -> None:
    """each rank looks for an overflow in what it owns, and asks no other rank"""
    for module in (parallel, overflow):
        patch.setattr(module, "agree_on_overflow", lambda comm, seen, equal="": seen)


@replaces(checkpoint, "save_job")
def rank_0_saves(right: Any, comm: Any, *arguments: Any) -> Any:
    """`if rank == 0:` around a save in which every rank has a part"""
    return right(comm, *arguments) if comm.rank == 0 else None


@replaces(resume, "_state")
def state_of_rank_0(right: Any, checkpoint: Any, axes: Any, held: Any, before: str) -> Any:
    """every rank restores the optimizer state of rank 0's elements"""
    parameter, start, stop = held
    return right(checkpoint, axes, (parameter, 0, stop - start), before)


def kept_by_the_graph(patch: Patch) -> None:
    """a node keeps the array that its forward read: gathers and releases continue, and the memory does not fall"""
    right, kept = SampledTensor.__init__, []

    def keeps(self: Any, tensor: Any, version: int, array: Any) -> None:
        right(self, tensor, version, array)
        kept.append(array)

    patch.setattr(SampledTensor, "__init__", keeps)


def saved_as_arrays(patch: Patch) -> None:
    """what backward needs of a parameter is saved as its array"""
    patch.setattr(Parameter, "saved", lambda self: Tensor(self.data))


def released_late(patch: Patch) -> None:
    """a unit's weights are freed when the next unit's are released: the average is right, the peak is not"""
    previous: list[Any] = []

    def late(self: Any) -> None:
        previous.append(self.flat.release() if not self.flat.released else None)
        del previous[:-1]

    patch.setattr(FSDPUnit, "release", late)


def saved_and_resumed() -> Recording:
    """Train six steps, save a checkpoint, and train six more from it."""
    with TemporaryDirectory() as folder:
        half: dict[str, Any] = {"dp": 2, "zero": 1, "save": folder}
        jobs.train_job(2, jobs.STEPS // 2, **half)()
        return jobs.train_job(2, resume=True, **half)()


def saved() -> Recording:
    """Train twelve steps and save a checkpoint."""
    with TemporaryDirectory() as folder:
        return jobs.train_job(2, dp=2, zero=1, save=folder)()
