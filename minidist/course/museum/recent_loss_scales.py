"""Bugs of the loss on split vocabularies, sequences and pipelines, from public threads of 2024 to 2026.

Proved by: tests/museum/test_recent_optimizer.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import Tensor
from minidist.core.comm import Comm
from minidist.core.parallel.tensor import vocabulary
from minidist.core.parallel.tensor.regions import gather_from_tensor_parallel_region
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch
from minidist.course.museum.recent_optimizer import TINY
from minidist.job.train import recipe, run
from minidist.job.train.strategies.pipeline import PipelineParallel

CHECKS = "tests/museum/test_recent_optimizer.py"
SPLIT: dict[str, Any] = {"tp": 2}
SEQUENCES: dict[str, Any] = {"cp": 2}
HEADS: dict[str, Any] = {"cp": 2, "attention": "ulysses"}
BALANCED: dict[str, Any] = {"dp": 2, "ep": 2, "experts": 2}
SPLIT_EXPERTS: dict[str, Any] = {"tp": 2, "experts": 2}
STAGES: dict[str, Any] = {"pp": 2, "microbatches": 4, "layers": 2}


def words_of_other_ranks(patch: Patch) -> None:
    """the target's logit is summed over ranks in a way that the tape does not record"""
    right = vocabulary.vocab_parallel_cross_entropy

    def partly_detached(logits: Tensor, targets: Any, *rest: Any, comm: Comm, vocab_size: int) -> Tensor:
        # A token whose word is on another rank has no gradient here; the softmax's part of it is lost.
        first, last = vocabulary.vocab_range(vocab_size, comm.rank, comm.size)
        mine = ((targets >= first) & (targets < last)).astype(logits.dtype)[..., None]
        logits = logits * Tensor(mine) + logits.detach() * Tensor(1 - mine)
        return right(logits, targets, *rest, comm=comm, vocab_size=vocab_size)

    patch.setattr(vocabulary, "vocab_parallel_cross_entropy", partly_detached)


def gathered_and_split_again(patch: Patch) -> None:
    """the logits are gathered, and go to a loss that takes them for this rank's part of the vocabulary"""
    right = vocabulary.vocab_parallel_cross_entropy

    def of_whole(logits: Tensor, targets: Any, *rest: Any, comm: Comm, vocab_size: int) -> Tensor:
        whole = gather_from_tensor_parallel_region(logits, comm)
        return right(whole, targets, *rest, comm=comm, vocab_size=whole.shape[-1] * comm.size)

    patch.setattr(vocabulary, "vocab_parallel_cross_entropy", of_whole)


def multiplied_by_context_ranks(patch: Patch) -> None:
    """the loss is multiplied by the ranks of a sequence, and the sum over them is not divided by their number"""

    def parallelize(job: Any, comm: Comm, *rest: Any) -> Any:
        job.targets_per_sample //= job.batches.dims.cp
        return recipe.parallelize(job, comm, *rest)

    patch.setattr(run, "parallelize", parallelize)


def divided_by_context_ranks(patch: Patch) -> None:
    """the divisor has the tokens of all ranks, and the ranks of a sequence are counted once more"""

    def parallelize(job: Any, comm: Comm, *rest: Any) -> Any:
        job.targets_per_sample *= job.batches.dims.cp
        return recipe.parallelize(job, comm, *rest)

    patch.setattr(run, "parallelize", parallelize)


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

    patch.setattr(run, "parallelize", parallelize)


def divided_by_micro_batches(patch: Patch) -> None:
    """the schedule divides by the number of micro-batches a loss whose divisor is of all of them already"""
    loss, forward_backward = PipelineParallel._loss, PipelineParallel.forward_backward

    def mean(self: Any, *batch: Any) -> Any:
        return loss(self, *batch) * np.array(1 / self.job.batches.accumulation, self.job.dtype)

    def report(self: Any, step: int) -> list[float]:
        return [value * self.job.batches.accumulation for value in forward_backward(self, step)]

    patch.setattr(PipelineParallel, "_loss", mean)
    patch.setattr(PipelineParallel, "forward_backward", report)


EXHIBITS = [
    Exhibit(
        "129",
        "words on other ranks give no gradient",
        "The log-probability of each target was taken from the rank that has its word, by an all-reduce of which"
        " autograd knows nothing. The value was right. When the word belonged to another rank, a rank's part of the"
        " vocabulary got a gradient of zero, or another wrong one.",
        words_of_other_ranks,
        jobs.train_job(2, steps=3, **TINY, **SPLIT),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, SPLIT)),),
        "https://github.com/modelscope/ms-swift/pull/9947",
    ),
    Exhibit(
        "130",
        "whole logits are taken for a part of the vocabulary",
        "As reported, the head gathered the logits of all ranks, and they went to the loss for a split vocabulary,"
        " which summed the exponentials over ranks again. With t ranks the loss was the right one plus log(t), and"
        " gradients were wrong.",
        gathered_and_split_again,
        jobs.train_job(2, steps=3, **TINY, **SPLIT),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, SPLIT)),),
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    ),
    Exhibit(
        "131",
        "the loss is multiplied by the context-parallel ranks",
        "The loss was multiplied by the number of ranks that share a sequence, which was right as long as gradients"
        " were averaged over these ranks as well. They came to be divided by the data-parallel ranks alone, and the"
        " factor stayed.",
        multiplied_by_context_ranks,
        jobs.train_job(2, steps=3, optimizer="sgd", **TINY, **SEQUENCES),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, SEQUENCES)),),
        "https://github.com/NVIDIA/Megatron-LM/issues/906",
    ),
    Exhibit(
        "132",
        "the schedule divides a loss that is normalised already",
        "The trainer weighed each micro-batch's loss so that their sum is the loss of the batch. The library's schedule"
        " divided it by the number of micro-batches once more. Gradients, their norm and the update were as many times"
        " too small; the other engine, without a pipeline, reported another norm for the same data.",
        divided_by_micro_batches,
        jobs.train_job(2, steps=3, optimizer="sgd", **{**TINY, **STAGES}),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, STAGES)),),
        "https://github.com/areal-project/AReaL/pull/1273",
    ),
    Exhibit(
        "136",
        "the loss shrinks with the ranks of a sequence",
        "A rank's loss was weighted by its tokens, divided by the tokens of all ranks, and multiplied by the number of"
        " replicas, because gradients are averaged. They are averaged over the ranks of a sequence as well, and these"
        " were not in the factor: with 8 of them and one replica, a loss of 1.0 became 0.125.",
        divided_by_context_ranks,
        jobs.train_job(2, steps=3, optimizer="sgd", **TINY, **HEADS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, HEADS)),),
        "https://github.com/ByteDance-Seed/VeOmni/pull/338",
    ),
    Exhibit(
        "137",
        "the balancing loss weakens with every data-parallel rank",
        "The global balancing loss of the experts counted the tokens of all data-parallel ranks in its divisor, but a"
        " rank had the probabilities of its tokens alone. Its gradient was as many times too small as there were"
        " ranks, so the same coefficient meant less than for the other balancing losses.",
        balance_over_all_tokens,
        jobs.train_job(2, steps=3, **TINY, **BALANCED),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, BALANCED)),),
        "https://github.com/NVIDIA/Megatron-LM/issues/3672",
    ),
    Exhibit(
        "138",
        "the balancing loss depends on the tensor-parallel ranks",
        "With a loss per token, the balancing loss was scaled by the tokens of one rank, to cancel a later division by"
        " those of all ranks. The ranks of the tensor- and context-parallel group were missing in that factor, so runs"
        " that differed in nothing but tensor parallelism had different losses.",
        balance_by_tensor_ranks,
        jobs.train_job(2, steps=3, **TINY, **SPLIT_EXPERTS),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, SPLIT_EXPERTS)),),
        "https://github.com/NVIDIA/Megatron-LM/pull/5047",
    ),
]
