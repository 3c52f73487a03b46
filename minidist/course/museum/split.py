"""Bugs of split layers and sequences: which rank holds which part of a matrix, vocabulary, text or set of experts.

Proved by: tests/museum/test_museum.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import linear
from minidist.core.base import arrays
from minidist.core.base.layout import Layout
from minidist.core.nn import GPT, experts
from minidist.core.parallel.context import ring_attention
from minidist.core.parallel.expert import dispatch
from minidist.core.parallel.tensor import layers, regions, sharding, vocabulary
from minidist.course.museum import split_jobs as jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch
from minidist.course.museum.jobs import train_job
from minidist.nn import Llama
from minidist.optim.muon import newton_schulz
from minidist.parallel import WholeMatrices, replica_guard
from minidist.parallel.expert import data_parallel as expert_data_parallel
from minidist.parallel.tensor import full_state, grad_norm, llama, sequence_layers, sequence_parallel

TENSOR, CONTEXT, EXPERT = (f"tests/parallel/test_{name}.py" for name in ("tensor", "context", "expert"))


def bias_on_every_rank(patch: Patch) -> None:
    """the bias of a row-parallel layer goes into each rank's product, so the sum contains it once per rank"""

    def forward(self: Any, x: Any) -> Any:
        y = linear(x, self.weight, self.bias, None, self.weight_is_in_out)
        return regions.reduce_from_tensor_parallel_region(y, self.comm)

    patch.setattr(layers.RowParallelLinear, "forward", forward)


def contiguous_qkv(patch: Patch) -> None:
    """the fused matrix of Q, K and V is cut into contiguous parts, and joined in the same way"""
    take, join = sharding.take_shard, full_state.join_shards

    def plain(layout: Any) -> Any:
        return Layout(layout.global_shape, layout.axes, layout.dims, padding=layout.padding)

    patch.setattr(sharding, "take_shard", lambda array, layout, rank, ranks: take(array, plain(layout), rank, ranks))
    patch.setattr(full_state, "join_shards", lambda shards, layout: join(shards, plain(layout)))


def short_vocabulary(patch: Patch) -> None:
    """the last word of each rank's range is treated as another rank's"""
    right = vocabulary.vocab_range

    def short(size: int, rank: int, ranks: int) -> tuple[int, int]:
        first, last = right(size, rank, ranks)
        return first, max(first, last - 1)

    patch.setattr(vocabulary, "vocab_range", short)


def padded_softmax(patch: Patch) -> None:
    """the words that only fill the last rank's range take part in the softmax"""
    right = vocabulary.vocab_range
    patch.setattr(
        vocabulary,
        "vocab_range",
        lambda size, rank, ranks: right(vocabulary.padded_vocab_size(size, ranks), rank, ranks),
    )


def norms_not_reduced(patch: Patch) -> None:
    """every rank keeps the layer norms' gradient of its tokens alone"""
    patch.setattr(sequence_parallel, "copy_to_tensor_parallel_region", lambda x, comm: x)


def biases_not_reduced(patch: Patch) -> None:
    """every rank keeps the gradient of a row-parallel bias of its tokens alone"""
    patch.setattr(sequence_layers, "copy_to_tensor_parallel_region", lambda x, comm: x)


def norm_of_own_tiles(patch: Patch) -> None:
    """each rank clips by the norm of its shards alone"""
    patch.setattr(grad_norm, "all_reduce", lambda comm, array: array)


def replicas_counted_once_per_rank(patch: Patch) -> None:
    """replicated parameters are counted in the norm once per rank"""
    patch.setattr(grad_norm, "sharded_over", lambda parameter: (("tp",), 1))


def shared_heads_not_summed(patch: Patch) -> None:
    """ranks that hold copies of one key-value head keep the gradient of their query heads alone"""
    patch.setattr(llama.SharedInputColumnParallelLinear, "_replicated", lambda self, parameter: parameter)


def data_axis_only(patch: Patch) -> None:
    """gradients are summed over the data axis; with one replica there is no other rank"""
    patch.setattr(jobs, "gradient_axes", lambda mesh: mesh["dp"])
    patch.setattr(replica_guard, "check_axes", lambda *_: None)  # which refuses that


def positions_from_zero(patch: Patch) -> None:
    """each rank numbers its own tokens from 0"""
    for module in (GPT, Llama):
        patch.setattr(module, "forward", _restarted(module.forward))


def _restarted(forward: Any) -> Any:
    def restarted(self: Any, tokens: Any, targets: Any = None, divisor: Any = None, positions: Any = None) -> Any:
        return forward(self, tokens, targets, divisor, np.arange(tokens.shape[1]))

    return restarted


def shards_orthogonalized(patch: Patch) -> None:
    """Muon orthogonalises each rank's shard of a matrix instead of the matrix"""

    def own_shard(self: Any, parameter: Any, update: Any, shapes: Any) -> Any:
        return newton_schulz(update.reshape(parameter.shape)).reshape(-1)

    patch.setattr(WholeMatrices, "_orthogonal", own_shard)


def last_maximum(patch: Patch) -> None:
    """the online softmax keeps the maximum of the last block instead of the largest so far"""
    patch.setattr(arrays, "maximum", lambda a, b: b)


def gradients_stay(patch: Patch) -> None:
    """the gradients of keys and values are not sent back to their owner"""
    patch.setattr(ring_attention.RingAttention, "_pass_on", lambda self, gradients, shape: ([], gradients))


def experts_summed(patch: Patch) -> None:
    """the gradients of different experts are summed over the axis that distributes them"""
    patch.setattr(expert_data_parallel, "bool", lambda value: False)


def capacity_of_the_batch(patch: Patch) -> None:
    """a rank gives out as many slots as one device would for all ranks' tokens"""
    right = experts.expert_capacity
    patch.setattr(experts, "expert_capacity", lambda tokens, *rest: right(2 * tokens, *rest))


def slots_in_the_first_order(patch: Patch) -> None:
    """the experts' results are read in the order in which the tokens were sent"""
    right = dispatch.exchange

    def wrong(comm: Any, slots: Any, to_experts: bool) -> Any:
        result = right(comm, slots, to_experts)
        return result if to_experts else result[::-1].copy()

    patch.setattr(dispatch, "exchange", wrong)


MODEL = "test_gpt_equals_one_device_in_every_tensor_of_every_step"
SEQUENCE = "test_a_model_equals_one_device_in_every_tensor_of_every_step"
EXPERTS = "test_sharded_experts_equal_one_device_in_every_tensor_of_every_step"
NORM = "test_the_clip_norm_counts_every_global_element_once"

EXHIBITS = [
    Exhibit(
        "7",
        "a row-parallel bias is added on every rank",
        "Each rank's layer is an ordinary layer, with a bias, and then the results are summed. Where biases begin at"
        " zero, nothing can be seen in the first step; where they do not, the network is another one.",
        bias_on_every_rank,
        jobs.split(),
        (Catch(TENSOR, "test_column_and_row_parallel_layers_are_exact_on_integers", (2, False, "sgd")),),
    ),
    Exhibit(
        "8",
        "a fused QKV matrix is cut contiguously",
        "Rank 0 gets all of Q and half of K. Every shape fits, the gathered weights are right, since joining undoes the"
        " cut, and the network learns what it can with attention between the wrong things.",
        contiguous_qkv,
        jobs.split(),
        (Catch(TENSOR, MODEL, (2, "sgd", False)),),
    ),
    Exhibit(
        "9a",
        "vocabulary ranges are off by one at the end",
        "`last` was taken as inclusive by one function and as exclusive by the other. One word in each range has no"
        " embedding: the zero vector. In a test with few words it may not even occur.",
        short_vocabulary,
        jobs.split(),
        (
            Catch(TENSOR, "test_the_embedding_is_exact_for_every_word", (2, 8)),
            Catch(TENSOR, "test_the_embedding_is_exact_for_every_word", (2, 7)),
            Catch(TENSOR, "test_vocab_parallel_cross_entropy", (2, 12, False)),
        ),
    ),
    Exhibit(
        "9b",
        "the padding of a vocabulary takes part in the softmax",
        "A vocabulary that does not divide is padded. The padding's logits are not minus infinity but zero, and take"
        " their share of the probability; the model learns to push them down, and reports a loss that is a little too"
        " high.",
        padded_softmax,
        jobs.split(),
        (Catch(TENSOR, "test_vocab_parallel_cross_entropy", (4, 5, False)),),
    ),
    Exhibit(
        "11c",
        "the norm of a rank's own tiles",
        "As in 11a, with matrices in tiles: every rank scales by another number, and replicated parameters drift"
        " apart.",
        norm_of_own_tiles,
        jobs.split(clip=0.3),
        (Catch(TENSOR, NORM, (2, False)),),
    ),
    Exhibit(
        "11d",
        "replicated parameters are counted once per rank",
        "The squares of all ranks are summed, and layer norms are on every rank. The norm is too large by a little;"
        " clipping is too strong by as much.",
        replicas_counted_once_per_rank,
        jobs.split(clip=0.3),
        (Catch(TENSOR, NORM, (2, False)),),
    ),
    Exhibit(
        "12a",
        "under sequence parallelism layer-norm gradients are not reduced",
        "With the sequence split, a layer norm sees part of the tokens on each rank. Its parameters are replicated, and"
        " it is easy to believe that their gradients are, too.",
        norms_not_reduced,
        jobs.split(True),
        (Catch(TENSOR, MODEL, (2, "sgd", True)),),
    ),
    Exhibit(
        "12b",
        "under sequence parallelism bias gradients are not reduced",
        "The same for the bias of a row-parallel layer, which is added after the tokens have been scattered. Mending"
        " the layer norms did not include it.",
        biases_not_reduced,
        jobs.split(True),
        (Catch(TENSOR, MODEL, (2, "sgd", True)),),
    ),
    Exhibit(
        "25",
        "with one replica, a split sequence's gradients are never summed",
        "Gradients were summed over the data axis, and the context axis was part of it whenever there were replicas."
        " With one replica the reduction was left out: there was nothing to sum, it seemed.",
        data_axis_only,
        jobs.long_context(),
        (Catch("tests/museum/test_checks.py", "test_a_split_sequence_trains_like_one_device"),),
    ),
    Exhibit(
        "27a",
        "positions restart on each rank of a split sequence",
        "Every rank embeds positions 0, 1, 2 and so on for its own tokens. The model sees a text made of pieces that"
        " all start at its beginning, and learns to cope with that.",
        positions_from_zero,
        jobs.long_context(),
        (Catch(CONTEXT, SEQUENCE, (2, "gpt", "ring", "sgd")), Catch(CONTEXT, SEQUENCE, (2, "gpt", "ulysses", "sgd"))),
    ),
    Exhibit(
        "27b",
        "rotary positions restart on each rank of a split sequence",
        "The same with rotary angles, where no table says how long a text may be, so that nothing can be out of range.",
        positions_from_zero,
        jobs.long_context("llama"),
        (
            Catch(CONTEXT, SEQUENCE, (2, "llama", "ring", "sgd")),
            Catch(CONTEXT, SEQUENCE, (2, "llama", "ulysses", "sgd")),
        ),
    ),
    Exhibit(
        "29",
        "the online softmax forgets the largest score",
        "In exact arithmetic any shift of the exponent is right, and small scores never show it. With large scores what"
        " came before is scaled up until it overflows.",
        last_maximum,
        jobs.large_scores,
        (Catch(CONTEXT, "test_large_scores_do_not_overflow_in_the_online_softmax", error="FloatingPointError"),),
    ),
    Exhibit(
        "30",
        "gradients of keys and values are not sent back",
        "Keys and values are passed round the ring, and so must their gradients be. They were added where the blocks"
        " were at the end.",
        gradients_stay,
        jobs.long_context(),
        (Catch(CONTEXT, "test_packed_attention_forward_and_backward", (2, "ring", 16)),),
    ),
    Exhibit(
        "32",
        "gradients of a key-value head that ranks share are not summed",
        "With fewer key-value heads than ranks, some ranks hold copies of one head. They are replicas within a cut"
        " matrix, and neither the code for replicas nor that for cut matrices handled them.",
        shared_heads_not_summed,
        jobs.shared_heads,
        (Catch(TENSOR, "test_fewer_key_value_heads_than_ranks", (4, 2, False), error="MismatchError"),),
    ),
    Exhibit(
        "31a",
        "gradients of different experts are summed",
        "Experts have the same shapes and, on their ranks, the same names. A sum over all ranks succeeds, and makes"
        " one gradient of two experts'.",
        experts_summed,
        jobs.with_experts(),
        (Catch(EXPERT, EXPERTS, ((1, 2), 1, 12.0)),),
    ),
    Exhibit(
        "31b",
        "the capacity of the whole batch instead of the group",
        "How many tokens an expert takes was computed from the tokens of all ranks and applied on each. Nothing is"
        " dropped that should be; the paper's number is another.",
        capacity_of_the_batch,
        jobs.with_experts(0.5),
        (Catch(EXPERT, "test_four_all_to_alls_a_layer", (2, 1)),),
    ),
    Exhibit(
        "31c",
        "the experts' results come back in another order",
        "One all-to-all dispatches, another combines; the combine took the blocks in the order in which they were sent."
        " Tokens get the results of other tokens.",
        slots_in_the_first_order,
        jobs.with_experts(),
        (Catch(EXPERT, EXPERTS, ((1, 2), 1, 12.0)),),
    ),
    Exhibit(
        "33",
        "Muon orthogonalises shards",
        "Momentum is element by element, so an optimizer like it works on shards. Newton-Schulz is a product of whole"
        " matrices: of half of the columns it makes other orthonormal rows. Every rank steps by a valid matrix of its"
        " own, and the loss falls as fast.",
        shards_orthogonalized,
        train_job(2, tp=2, optimizer="muon", momentum=0.9, precision="fp64"),
        (Catch("tests/parallel/test_muon.py", "test_jobs_equal_one_device", (2, {"tp": 2, "precision": "fp64"})),),
    ),
]
