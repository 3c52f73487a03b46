"""Bugs of the loss on split vocabularies, sequences and pipelines, from public threads of 2024 to 2026.

Proved by: tests/museum/test_recent_optimizer.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import Tensor
from minidist.core.comm import Comm
from minidist.core.parallel import tensor_parallel
from minidist.course.museum.exhibit import Patch, replaces
from minidist.job.train import recipe, trainer
from minidist.job.train.strategies.pipeline import PipelineParallel
from minidist.parallel.tensor.gathering import gather_from_tensor_parallel_region


@replaces(tensor_parallel, "vocab_parallel_cross_entropy")
def words_of_other_ranks(right: Any, logits: Tensor, targets: Any, *rest: Any, comm: Comm, vocab_size: int) -> Any:
    """the target's logit is summed over ranks in a way that the tape does not record"""
    # A token whose word is on another rank has no gradient here; the softmax's part of it is lost.
    first, last = tensor_parallel.vocab_range(vocab_size, comm.rank, comm.size)
    mine = ((targets >= first) & (targets < last)).astype(logits.dtype)[..., None]
    logits = logits * Tensor(mine) + logits.detach() * Tensor(1 - mine)
    return right(logits, targets, *rest, comm=comm, vocab_size=vocab_size)


@replaces(tensor_parallel, "vocab_parallel_cross_entropy")
def gathered_and_split_again(right: Any, logits: Tensor, targets: Any, *rest: Any, comm: Comm, vocab_size: int) -> Any:
    """the logits are gathered, and go to a loss that takes them for this rank's part of the vocabulary"""
    whole = gather_from_tensor_parallel_region(logits, comm)
    return right(whole, targets, *rest, comm=comm, vocab_size=whole.shape[-1] * comm.size)


@replaces(trainer, "parallelize")
def multiplied_by_context_ranks(_: Any, job: Any, comm: Comm, *rest: Any) -> Any:
    """the loss is multiplied by the ranks of a sequence, and the sum over them is not divided by their number"""
    job.targets_per_sample //= job.batches.dims.cp
    return recipe.parallelize(job, comm, *rest)


@replaces(trainer, "parallelize")
def divided_by_context_ranks(_: Any, job: Any, comm: Comm, *rest: Any) -> Any:
    """the divisor has the tokens of all ranks, and the ranks of a sequence are counted once more"""
    job.targets_per_sample *= job.batches.dims.cp
    return recipe.parallelize(job, comm, *rest)


def balance_over_all_tokens(patch: Patch) -> None:
    """the balancing loss of a rank's tokens is divided by the tokens of all data-parallel ranks"""
    _weaken_balance(patch, "dp")


def balance_by_tensor_ranks(patch: Patch) -> None:
    """the weight of the balancing loss is divided by the tensor-parallel ranks"""
    _weaken_balance(patch, "tp")


def _weaken_balance(patch: Patch, axis: str) -> None:
    def parallelize(job: Any, comm: Comm, *rest: Any) -> Any:
        job.model.aux_loss_weight /= getattr(job.batches.dims, axis)
        return recipe.parallelize(job, comm, *rest)

    patch.setattr(trainer, "parallelize", parallelize)


def divided_by_micro_batches(patch: Patch) -> None:
    """the schedule divides by the number of micro-batches a loss whose divisor is of all of them already"""
    loss, forward_backward = PipelineParallel._loss, PipelineParallel.forward_backward

    def mean(self: Any, *batch: Any) -> Any:
        return loss(self, *batch) * np.array(1 / self.job.batches.accumulation, self.job.dtype)

    def report(self: Any, step: int) -> list[float]:
        return [value * self.job.batches.accumulation for value in forward_backward(self, step)]

    patch.setattr(PipelineParallel, "_loss", mean)
    patch.setattr(PipelineParallel, "forward_backward", report)
