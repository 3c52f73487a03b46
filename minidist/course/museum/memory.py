"""Bugs of memory: what is sharded, freed, recomputed or saved.

Proved by: tests/museum/test_museum.py
"""

from contextlib import nullcontext
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

from minidist.core.autograd import Parameter, Tensor
from minidist.core.collectives import all_gather
from minidist.core.optim import block_square_sums, clip_by_norm_, norm_from_blocks
from minidist.core.parallel import flat_shards
from minidist.core.parallel.fsdp_unit import FSDPUnit
from minidist.core.train import data_axis
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch, Recording
from minidist.job.checkpoint import resume
from minidist.job.train import run
from minidist.nn.ops.in_place import SampledTensor
from minidist.parallel import overflow
from minidist.parallel import zero as parallel_zero
from minidist.techniques.loss_scaling import extension as loss_scaling

CHECKS = "tests/museum/test_checks.py"


def norm_of_the_shard(patch: Patch) -> None:
    """each rank clips by the norm of what it owns"""

    def clip(comm: Any, parts: Any, limit: float, *_: Any) -> None:
        for part in parts:
            clip_by_norm_(part, norm_from_blocks(block_square_sums(part.grad)), limit)

    patch.setattr(parallel_zero, "clip_shards_", clip)
    patch.setattr(data_axis, "shard_square_sums", lambda comm, parts, skip: block_square_sums(parts[0].grad))


def norm_counted_once_per_rank(patch: Patch) -> None:
    """every rank contributes the squares of the same shard"""
    right = all_gather

    def repeated(comm: Any, array: Any, **keywords: Any) -> Any:
        whole = right(comm, array, **keywords)
        return whole if array.dtype.itemsize == 4 else whole.reshape(comm.size, -1)[[0] * comm.size].reshape(-1)

    patch.setattr(flat_shards, "all_gather", repeated)


def new_mask(patch: Patch) -> None:
    """the replay continues to count random draws where the forward stopped"""
    module = import_module("minidist.nn.ops.checkpoint")  # the package has a function of that name
    patch.setattr(module, "replay_calls", lambda calls: nullcontext())


def overflow_of_the_shard(patch: Patch) -> None:
    """each rank looks for an overflow in what it owns, and asks no other rank"""
    for module in (overflow, loss_scaling):
        patch.setattr(module, "agree_on_overflow", lambda comm, seen, equal="": seen)


def rank_0_saves(patch: Patch) -> None:
    """`if rank == 0:` around a save in which every rank has a part"""
    right = resume.save_job

    def alone(comm: Any, *arguments: Any) -> Any:
        return right(comm, *arguments) if comm.rank == 0 else None

    patch.setattr(run, "save_job", alone)


def state_of_rank_0(patch: Patch) -> None:
    """every rank restores the optimizer state of rank 0's elements"""
    right = resume._state
    patch.setattr(
        resume,
        "_state",
        lambda checkpoint, axes, p, start, stop, before: right(checkpoint, axes, p, 0, stop - start, before),
    )


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


EXHIBITS = [
    Exhibit(
        "11a",
        "the clip norm of the local shard",
        "Clipping was a method of the optimizer, and the optimizer now saw only a shard. Each rank scales its part by"
        " another number, so the gradient's direction changes, a little, in every step in which it is clipped.",
        norm_of_the_shard,
        jobs.train_job(3, dp=3, zero=1, clip=0.3),
        (
            Catch(
                "tests/parallel/test_zero.py",
                "test_zero_equals_data_parallel_and_one_device_bit_for_bit",
                (1, "adam", 3),
            ),
        ),
    ),
    Exhibit(
        "11b",
        "the norm counts one shard once per rank",
        "The squares of all ranks were added, and on every rank they were those of the same elements. The norm is"
        " too small or too large, but never out of range.",
        norm_counted_once_per_rank,
        jobs.train_job(3, dp=3, zero=1, clip=0.3),
        (
            Catch(
                "tests/parallel/test_zero.py",
                "test_zero_equals_data_parallel_and_one_device_bit_for_bit",
                (1, "adam", 3),
            ),
        ),
    ),
    Exhibit(
        "14",
        "recomputation draws a new dropout mask",
        "Forward runs once for the loss and again for the gradient, and between the two the generator has advanced. The"
        " gradient is that of another network. It trains; dropout is noise, and this is more of it.",
        new_mask,
        jobs.train_job(2, dp=2, recompute="full", dropout=0.2),
        (
            Catch("tests/nn/test_recompute.py", "test_gradients_have_the_same_bits_with_dropout", ("full",)),
            Catch("tests/train/test_sharded.py", "test_recomputation_is_equal_bit_for_bit", ("full", 3)),
            Catch(CHECKS, "test_a_replayed_mask"),
        ),
    ),
    Exhibit(
        "15a",
        "an overflow that one rank saw",
        "In float16 a step whose gradient overflows is skipped. The optimizer was sharded, so each rank looked at its"
        " own shard: one found an infinity and skipped, the other stepped and continued to gather its parameters. From"
        " then on their messages belong to different steps. Where nothing compares them the job hangs, or"
        " trains on other numbers.",
        overflow_of_the_shard,
        jobs.train_job(2, dp=2, zero=1, precision="fp16"),
        (
            Catch(
                "tests/parallel/test_mixed_precision.py",
                "test_every_strategy_equals_one_device_bit_for_bit",
                ("zero1", "float16", 3),
                error="MismatchError",
            ),
            Catch(
                "tests/train/test_precision.py",
                "test_compare_is_equal_bit_for_bit_and_every_byte_is_in_the_closed_form",
                ("zero 2", "fp16"),
                error="MismatchError",
            ),
        ),
    ),
    Exhibit(
        "16a",
        "rank 0 alone saves the checkpoint",
        "Rank 0 writes the logs, and so it got the checkpoint too. But a sharded state must be gathered, and the others"
        " were already in the next step. Under many launchers this is a job that hangs at its first save, hours"
        " after it began.",
        rank_0_saves,
        saved,
        (
            Catch(CHECKS, "test_every_rank_saves", error="DeadlockError"),
            Catch(
                "tests/checkpoint/test_resume.py",
                "test_the_next_steps_have_the_bits_of_the_uninterrupted_run",
                (1, 2),
                error="MismatchError",
            ),
        ),
    ),
    Exhibit(
        "16b",
        "a checkpoint restores another rank's state",
        "There was one file per rank, and one name too simple: every rank loaded rank 0's. Weights are replicated and"
        " were right, so the loss continued where it had stopped.",
        state_of_rank_0,
        saved_and_resumed,
        (
            Catch(
                "tests/checkpoint/test_resume.py", "test_the_next_steps_have_the_bits_of_the_uninterrupted_run", (2, 4)
            ),
        ),
    ),
    Exhibit(
        "19a",
        "the graph keeps freed weights alive",
        "Sharding freed the gathered weights after each layer's forward. The tape had saved them for backward. Nothing"
        " is wrong but the memory, and on average it even falls.",
        kept_by_the_graph,
        jobs.train_job(2, dp=2, zero=3, layers=4, peak="unsharded"),
        (Catch("tests/parallel/test_fully_shard.py", "check_peaks", (2, 0)),),
    ),
    Exhibit(
        "19b",
        "weights are freed one layer late",
        "A reference in a local variable survived until the next call. Two layers are whole where one was planned; the"
        " average hardly shows it, the peak does, and the peak decides whether a job runs.",
        released_late,
        jobs.train_job(2, dp=2, zero=3, layers=4, peak="unsharded"),
        (Catch("tests/parallel/test_fully_shard.py", "check_peaks", (2, 0)),),
    ),
    Exhibit(
        "19c",
        "the tape saves arrays instead of parameters",
        "The same cause in one line of an engine: `save(weight.data)` where `save(weight)` would have released it.",
        saved_as_arrays,
        jobs.train_job(2, dp=2, zero=3, layers=4, peak="unsharded"),
        (Catch(CHECKS, "test_released_weights_are_gone"),),
    ),
]
