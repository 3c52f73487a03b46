"""Tensor parallelism of a Llama: projections that share their input, and key-value heads that ranks share.

    x ──▶ f ──┬──▶ q_proj (columns)          4 ranks, 8 query heads, 2 key-value heads
              ├──▶ k_proj (columns)          query heads of a rank   0 1 | 2 3 | 4 5 | 6 7
              └──▶ v_proj (columns)          its key-value head       0  |  0  |  1  |  1

One f (or one gather of the sequence) stands before all projections of an attention, and one before the two of an MLP.
With fewer key-value heads than ranks, neighbours hold the same head. Each has a part of its gradient, so backward sums
the gradient over those ranks: an all-reduce of the shard's size.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Ainslie et al., "GQA", 2023.

Proved by: tests/parallel/test_tensor.py, tests/parallel/test_tensor_against_torch.py
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from minidist.base.errors import check_divisible
from minidist.core.autograd import Parameter, Tensor, linear
from minidist.core.comm import Comm
from minidist.core.nn.layers import Conv1D, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel.model_parallel import Styles
from minidist.core.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardContext,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_to_tensor_parallel_region,
    split_heads,
    split_loss,
)
from minidist.parallel.tensor.sequence_layers import split_sequence
from minidist.parallel.tensor.sequence_regions import gather_from_sequence_parallel_region
from minidist.parallel.tensor.styles import ParallelStyle


class SharedInputColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel layer whose input has passed f already, because other layers share it.

    replicas > 1: this number of neighbouring ranks has the same columns, whose gradient backward sums over them.
    """

    def __init__(self, linear: Linear | Conv1D, context: ShardContext, name: str, replicas: int) -> None:
        shards = context.comm.size // replicas
        check_divisible(linear.out_features, f"out features of {name}", shards, "tensor")
        self.comm, self.name, self.activation = context.comm, linear.name, linear.activation
        self.weight_is_in_out = isinstance(linear, Conv1D)
        self.weight = context.shard_of(linear.weight, 1 if self.weight_is_in_out else 0, replicas=replicas)
        self.bias = None if linear.bias is None else context.shard_of(linear.bias, 0, replicas=replicas)
        # The ranks that hold the same columns are neighbours: {0, 1}, {2, 3}, ... with two replicas.
        first = self.comm.rank // replicas * replicas
        ranks = list(range(first, first + replicas))
        self.kv_replica_group = self.comm.group(ranks, f"copies{first}") if replicas > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / t)."""
        bias = None if self.bias is None else self._replicated(self.bias)
        return linear(x, self._replicated(self.weight), bias, self.activation, self.weight_is_in_out)

    def _replicated(self, parameter: Parameter) -> Tensor:
        """`parameter`, whose gradient backward sums over the ranks that hold the same shard."""
        group = self.kv_replica_group
        return parameter if group is None else copy_to_tensor_parallel_region(parameter, group)


class SharedInputColwise(ParallelStyle):
    """Linear or Conv1D: output features split; the module around it prepares the input (`PrepareModuleInput`)."""

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a SharedInputColumnParallelLinear."""
        self.expect(module, name, Linear, Conv1D)
        return SharedInputColumnParallelLinear(module, context, name, getattr(module, "kv_replicas", 1))


class GroupedHeadParallel(ParallelStyle):
    """An attention module with separate projections: each rank has 1/t of the heads, and of the key-value heads.

    With fewer key-value heads than ranks, t / kv_heads neighbouring ranks have the same one: those whose query heads
    read it.
    """

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the attention with the dropout of this rank's heads; projections know how many ranks share a head."""
        attention: Module = split_heads(module, context, name)
        ranks, kv_heads = context.comm.size, module.k_proj.out_features // module.head_size
        if ranks > kv_heads and ranks % kv_heads == 0:
            module.k_proj.kv_replicas = module.v_proj.kv_replicas = ranks // kv_heads
        else:
            check_divisible(kv_heads, f"key-value heads of {name}", ranks, "tensor")
        return attention


@dataclass
class PrepareModuleInput(ParallelStyle):
    """The first argument of a module passes f (or the gather of the sequence) once, for all layers that share it.

    Those layers get SharedInputColwise.
    """

    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the module with a forward pre-hook."""
        comm = context.comm  # the hook lives as long as the model, and the context holds all unsplit parameters

        def prepare(_: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return self._prepared(arguments[0], comm), *arguments[1:]

        module.register_forward_pre_hook(prepare)
        return module  # type: ignore[no-any-return]

    def _prepared(self, x: Tensor, comm: Comm) -> Tensor:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(x, comm, regather=True)
        return copy_to_tensor_parallel_region(x, comm)


def llama_plan(vocab_size: int, sequence_parallel: bool = False) -> Styles:
    """Return Megatron's split of a `Llama`: heads and key-value heads, the inner width, and the vocabulary.

    The three projections of an attention share one f, and the two of an MLP, so the counts are those of `gpt_plan`.
    """
    # As in `gpt_plan`, with separate projections: one f around all that share an input, so they do not copy it again.
    sp = sequence_parallel
    plan: Styles = {
        "": partial(split_loss, vocab_size=vocab_size),
        "model.embed_tokens": VocabParallelEmbedding,
        "lm_head": VocabParallelHead,
        "model.layers.*.self_attn": [GroupedHeadParallel(), PrepareModuleInput(sp)],
        "model.layers.*.self_attn.[qkv]_proj": SharedInputColwise(),
        "model.layers.*.self_attn.o_proj": RowParallelLinear,
        "model.layers.*.mlp": PrepareModuleInput(sp),
        "model.layers.*.mlp.gate_proj": SharedInputColwise(),
        "model.layers.*.mlp.up_proj": SharedInputColwise(),
        "model.layers.*.mlp.down_proj": RowParallelLinear,
    }
    norms = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")
    return split_sequence(plan, *(f"model.{name}" for name in norms)) if sp else plan
