"""Model parallelism over one mesh axis, applied to a whole model of this package: one function per axis.

    apply_expert_parallel     ep   each rank keeps some of the experts
    apply_tensor_parallel     tp   each rank keeps its shards of every matrix, also of its experts'
    apply_context_parallel    cp   each rank has a part of every sequence; attention communicates between the parts

Call them in this order, before parameters become flat arrays. Every rank builds the whole model from the same seed, so
none of them sends anything; a rank with other weights is refused, at once or with the next message of a collective.

Plans of other models, and other kinds of attention, are added in `hooks.plan_sources` and `hooks.attentions`.

Proved by: tests/train/test_axes.py, tests/parallel/test_split_examples.py
"""

from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError, nearest, quoted
from minidist.core.base.hooks import attentions, model_checks
from minidist.core.comm import Comm
from minidist.core.nn import GPT, MixtureOfExperts, Module
from minidist.core.parallel.context.ring_attention import RingAttention
from minidist.core.parallel.expert.dispatch import ExpertParallel
from minidist.core.parallel.tensor.parallelize import parallelize_module, tensor_parallel_plan

attentions.setdefault("ring", lambda comm, length, inner, neighbours: RingAttention(comm, length))


def apply_expert_parallel(model: Module, comm: Comm, style: ExpertParallel | None = None) -> Module:
    """Shard a model's experts over `comm`: an all-to-all brings each token to the rank of its expert, and back.

    style: of each mixture, in the place of `ExpertParallel`. Raises UsageError for a model without experts.
    """
    mixtures = [name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        raise UsageError(f"apply_expert_parallel: the {type(model).__name__} has no experts; give it n_experts")
    return parallelize_module(model, comm, dict.fromkeys(mixtures, style or ExpertParallel()), axis="ep")


def apply_tensor_parallel(model: Module, comm: Comm, sequence_parallel: bool = False) -> Module:
    """Split the matrices over `comm`; with sequence_parallel norms and dropout work on 1/t of the sequence."""
    return parallelize_module(model, comm, tensor_parallel_plan(model, sequence_parallel))


def apply_context_parallel(
    model: Module, comm: Comm, length: int, attention: str = "ring", ulysses: int = 2
) -> xp.Array:
    """Split sequences of `length` tokens over `comm`; returns the positions (T_local,) of this rank's tokens.

    attention: "ring", or another name of `hooks.attentions`. ulysses: how many neighbours exchange heads in one that
    has rings, too. Every attention module gets the attention as its `attention_fn`.
    """
    for check in model_checks:
        check("apply_context_parallel", model, comm)

    # One object for all layers: it holds no state of a layer, and its messages are matched in the order of calls.
    if attention not in attentions:
        known = ", ".join(sorted(attentions))
        raise UsageError(f"unknown attention {quoted(attention)}{nearest(attention, attentions)}; there are {known}")
    owners = [module for module in model.modules() if hasattr(module, "attention_fn")]
    crossing = attentions[attention](comm, length, owners[0].attention_fn, ulysses)
    for module in owners:
        module.attention_fn = crossing

    # Position embeddings and rotary angles look up these numbers; 0..T_local-1 on every rank would be silently wrong.
    positions: xp.Array = crossing.positions()
    use_positions(model, positions)
    return positions


def use_positions(model: Any, positions: xp.Array) -> None:
    """Look up position embeddings and rotary angles at `positions`, the tokens' places in the whole text.

    A hook, so that it also holds in a pipeline stage, whose input does not say where its tokens are.
    """
    table: Module = model.decoder.wpe if isinstance(model, GPT) else model.decoder.rotary_emb
    table.register_forward_pre_hook(lambda _, arguments: positions)
