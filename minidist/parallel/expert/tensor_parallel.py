"""Experts whose matrices are split too: over ep lie whole experts, over tp the columns and rows of each.

    fc (experts, D, H)      ep: | e0 e1 | e2 e3 |     tp: H split, as a column-parallel layer
    proj (experts, H, D)    ep: | e0 e1 | e2 e3 |     tp: H split, as a row-parallel layer, its bias added after the sum

The ranks of tp see the same tokens, so all route them equally, and the router is a replica whose gradient is the same
on each. With the sequence split a group of tokens is still what the tp ranks hold together: it is gathered before the
router, and each rank keeps its own rows of the result.

Sources: Rajbhandari et al., "DeepSpeed-MoE", 2022 (expert slicing); Megatron-LM's mixture of experts.

Proved by: tests/parallel/test_expert.py, tests/train/test_axes.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from minidist.base.errors import check_divisible
from minidist.core.autograd import Tensor
from minidist.core.comm import Comm
from minidist.core.nn.experts import MixtureOfExperts
from minidist.core.nn.gpt import GPT
from minidist.core.nn.module import Module
from minidist.core.parallel.model_parallel import Plan
from minidist.core.parallel.tensor_parallel import (
    ShardContext,
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
)
from minidist.nn.llama import Llama
from minidist.parallel.tensor.llama import llama_plan
from minidist.parallel.tensor.sequence_layers import gpt_plan
from minidist.parallel.tensor.sequence_regions import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from minidist.parallel.tensor.styles import ParallelStyle


class Region(Module):
    """The border of a region as a module, which takes the place of an `Identity` in a model."""

    def __init__(self, border: Callable[[Tensor, Comm], Tensor], comm: Comm) -> None:
        self.border, self.comm = border, comm

    def forward(self, x: Tensor) -> Tensor:
        """border(x, comm)."""
        return self.border(x, self.comm)


@dataclass
class ExpertTensorParallel(ParallelStyle):
    """A MixtureOfExperts: each expert's inner width is split over tp. Apply `ExpertParallel` before it, or not at all.

    Sends an all-reduce of the slots (local experts, P x capacity, D) in forward, and one in backward;
    sequence_parallel: an all-gather of the tokens in forward, and one of their gradients in backward, besides.
    """

    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the mixture with f and g around its experts' products, and hooks for a sequence that is split."""
        self.expect(module, name, MixtureOfExperts)
        comm = context.comm
        dims = module.expert_dims
        inner = next(getattr(module, part).shape[dim] for part, dim in dims.items() if dim is not None)
        check_divisible(inner, f"inner features of the experts of {name}", comm.size, "tensor")

        # Columns of fc and rows of proj, of each expert; the bias of proj is added after the sum, so it is whole.
        context.replica_of(module.router)
        for part, dim in dims.items():
            if dim is None:
                context.replica_of(getattr(module, part))
            else:
                setattr(module, part, context.shard_of(getattr(module, part), dim))

        # f before the experts' products and g after them, as around an MLP.
        module.f = Region(copy_to_tensor_parallel_region, comm)
        module.g = Region(reduce_from_tensor_parallel_region, comm)

        # The router must see a whole group of tokens.
        if self.sequence_parallel:
            module.register_forward_pre_hook(partial(_gather_sequence, comm))
            module.register_forward_hook(partial(_scatter_sequence, comm))
        return module


def _gather_sequence(comm: Comm, _: Module, arguments: tuple[Tensor, ...]) -> Tensor:
    """Return all tokens (batch, T, D): every rank routes them equally, so each has their whole gradient."""
    return gather_from_sequence_parallel_region(arguments[0], comm, tensor_parallel_output_grad=False)


def _scatter_sequence(comm: Comm, _: Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return this rank's rows (batch, T/t, D) of the mixture's output."""
    return scatter_to_sequence_parallel_region(output, comm)


def expert_gpt_plan(vocab_size: int, sequence_parallel: bool = False) -> Plan:
    """Return the `gpt_plan` for a GPT whose MLPs are mixtures of experts."""
    return _with_mixtures(gpt_plan(vocab_size, sequence_parallel), "transformer.h.*.mlp", sequence_parallel)


def expert_llama_plan(vocab_size: int, sequence_parallel: bool = False) -> Plan:
    """Return the `llama_plan` for a Llama whose MLPs are mixtures of experts."""
    return _with_mixtures(llama_plan(vocab_size, sequence_parallel), "model.layers.*.mlp", sequence_parallel)


def _with_mixtures(plan: Plan, place: str, sequence_parallel: bool) -> Plan:
    # Attention, norms and vocabulary as without experts; a mixture takes the place of each MLP.
    kept = {name: style for name, style in plan.items() if not f"{name}.".startswith(f"{place}.")}
    return {**kept, place: ExpertTensorParallel(sequence_parallel)}


def plan_of(model: Any, sequence_parallel: bool) -> Plan | None:
    """Return the plan of a GPT with experts or a split sequence, or of a Llama; None for another model."""
    if isinstance(model, GPT):
        plan = expert_gpt_plan if model.config.n_experts else gpt_plan
        return plan(model.config.vocab_size, sequence_parallel)
    if isinstance(model, Llama):
        plan = expert_llama_plan if model.config.num_local_experts else llama_plan
        return plan(model.config.vocab_size, sequence_parallel)
    return None
