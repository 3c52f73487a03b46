"""Bugs of split layers and sequences: which rank holds which part of a matrix, vocabulary, text or set of experts.

Proved by: tests/museum/test_museum.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import linear
from minidist.core.base import arrays
from minidist.core.base.layout import Layout
from minidist.core.nn import GPT, experts
from minidist.core.parallel import context_parallel, expert_parallel, tensor_parallel
from minidist.course.museum import split_jobs as jobs
from minidist.course.museum.exhibit import Patch, replaces
from minidist.nn import Llama
from minidist.optim.muon import newton_schulz
from minidist.parallel import WholeMatrices, replica_guard
from minidist.parallel.expert import data_parallel as expert_data_parallel
from minidist.parallel.tensor import full_state, grad_norm, llama, sequence_layers, sequence_parallel


@replaces(tensor_parallel.RowParallelLinear, "forward")
def bias_on_every_rank(_: Any, self: Any, x: Any) -> Any:
    """the bias of a row-parallel layer goes into each rank's product, so the sum contains it once per rank"""
    y = linear(x, self.weight, self.bias, None, self.weight_is_in_out)
    return tensor_parallel.reduce_from_tensor_parallel_region(y, self.comm)


def contiguous_qkv(patch: Patch) -> None:
    """the fused matrix of Q, K and V is cut into contiguous parts, and joined in the same way"""
    take, join = tensor_parallel.take_shard, full_state.join_shards

    def plain(layout: Any) -> Any:
        return Layout(layout.global_shape, layout.axes, layout.dims, padding=layout.padding)

    patch.setattr(tensor_parallel, "take_shard", lambda array, layout, *place: take(array, plain(layout), *place))
    patch.setattr(full_state, "join_shards", lambda shards, layout: join(shards, plain(layout)))


@replaces(tensor_parallel, "vocab_range")
def short_vocabulary(right: Any, size: int, rank: int, ranks: int) -> tuple[int, int]:
    """the last word of each rank's range is treated as another rank's"""
    first, last = right(size, rank, ranks)
    return first, max(first, last - 1)


def padded_softmax(patch: Patch) -> None:
    """the words that only fill the last rank's range take part in the softmax"""
    right = tensor_parallel.vocab_range
    patch.setattr(
        tensor_parallel,
        "vocab_range",
        lambda size, rank, ranks: right(tensor_parallel.padded_vocab_size(size, ranks), rank, ranks),
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


@replaces(WholeMatrices, "_orthogonal")
def shards_orthogonalized(_: Any, self: Any, parameter: Any, update: Any, shapes: Any) -> Any:
    """Muon orthogonalises each rank's shard of a matrix instead of the matrix"""
    return newton_schulz(update.reshape(parameter.shape)).reshape(-1)


def last_maximum(patch: Patch) -> None:
    """the online softmax keeps the maximum of the last block instead of the largest so far"""
    patch.setattr(arrays, "maximum", lambda a, b: b)


def gradients_stay(patch: Patch) -> None:
    """the gradients of keys and values are not sent back to their owner"""
    patch.setattr(context_parallel.RingAttention, "_pass_on", lambda self, gradients, shape, why: ([], gradients))


def experts_summed(patch: Patch) -> None:
    """the gradients of different experts are summed over the axis that distributes them"""
    patch.setattr(expert_data_parallel, "bool", lambda value: False)


def capacity_of_the_batch(patch: Patch) -> None:
    """a rank gives out as many slots as one device would for all ranks' tokens"""
    right = experts.expert_capacity
    patch.setattr(experts, "expert_capacity", lambda tokens, *rest: right(2 * tokens, *rest))


@replaces(expert_parallel.Exchange, "exchange")
def slots_in_the_first_order(right: Any, self: Any, comm: Any, slots: Any, why: str) -> Any:
    """the experts' results are read in the order in which the tokens were sent"""
    result = right(self, comm, slots, why)
    return result if self.to_experts == (why == "tensor_forward") else result[::-1].copy()
