"""Model parallelism over one mesh axis, applied to a whole model that was built on one device.

    plan = {"layers.0": ColumnParallelLinear, "layers.1": RowParallelLinear}
    parallelize_module(model, mesh["tp"], plan)

`apply_expert_parallel`, `apply_tensor_parallel` and `apply_context_parallel` do this for a whole model. Call them in
this order, before parameters become flat arrays. Nothing is sent: every rank builds the whole model from one seed.

A plan says how each module is split; what no key names stays whole on every rank. Each parameter then carries a
`Layout`, which checkpoints, clipping and counting read. Plans of other models, and other kinds of attention, are added
in `hooks.plan_of` and `hooks.split_attention`.

Source of the plans: Shoeybi et al., "Megatron-LM", 2019, section 3 and figure 3.

Proved by: tests/parallel/test_tensor.py, tests/train/test_axes.py, tests/parallel/test_split_examples.py
"""

import fnmatch
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.core.nn import GPT, MixtureOfExperts, Module
from minidist.core.parallel import tensor_parallel as tp
from minidist.core.parallel.context_parallel import RingAttention
from minidist.core.parallel.expert_parallel import ExpertParallel
from minidist.core.parallel.tensor_parallel import ShardContext

# How one module is split: (module, context, qualified name) -> what takes its place, perhaps the module itself.
Style = Callable[[Any, ShardContext, str], Module]
Styles = dict[str, Style | list[Style]]
Plan = Mapping[str, Style | list[Style]]


def parallelize_module(module: Module, comm: Comm, plan: Plan, axis: str = "tp") -> Module:
    """Split `module` over `comm` (`mesh["tp"]`) as `plan` says; returns the module that takes its place. Sends nothing.

    plan: {qualified name, "" for the module itself, with `*` for a part: a style or a list of them}. axis: the mesh
    axis's name, for the layouts. Raises UsageError for a plan that does not fit, and MismatchError when a rank has
    other weights, at once or with the next message.
    """
    hooks.check_weights("parallelize_module", module, comm, plan)
    context = ShardContext(comm, axis)
    for pattern, styles in plan.items():
        # It may name a module inside one that has replaced another.
        known = list(dict(module.named_modules()))
        names = fnmatch.filter(known, pattern)
        if not names:
            hooks.refusals().refuse_pattern(pattern, known)
        # A style may return another module, which takes the place of this one in the tree (or of the whole model).
        for name in names:
            for style in styles if isinstance(styles, list) else [styles]:
                module = _put(module, name, style(get_module(module, name), context, name))

    # What no style has split is whole on every rank; a tied parameter must be split wherever it is used.
    for name, parameter in module._all_parameters():
        if context.shards.get(parameter, parameter) is not parameter:
            hooks.refusals().refuse_shared(name, parameter)
        if parameter.layout is None:
            context.replica_of(parameter)
    return module


def get_module(module: Module, name: str) -> Any:
    """Return the module of a qualified name; "" is `module` itself."""
    for part in name.split(".") if name else []:
        module = module[int(part)] if part.isdigit() else getattr(module, part)  # type: ignore[index]
    return module


def _put(root: Module, name: str, module: Module) -> Module:
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    if last.isdigit():
        get_module(root, parent)[int(last)] = module
    else:
        setattr(get_module(root, parent), last, module)
    return root


def gpt_plan(vocab_size: int) -> Styles:
    """Return Megatron's split of a `GPT`: heads, the inner width of the MLP, and the vocabulary.

    Per layer 4 all-reduces of (batch, T, D), two forward and two backward.
    """
    # Column parallel, then row parallel: in attention (split by heads) and in the MLP (split by inner features).
    return {
        "": partial(tp.split_loss, vocab_size=vocab_size),
        "transformer.wte": tp.VocabParallelEmbedding,
        "lm_head": tp.VocabParallelHead,
        "transformer.h.*.attn": tp.split_heads,
        "transformer.h.*.attn.c_attn": partial(tp.ColumnParallelLinear, blocks=3),
        "transformer.h.*.attn.c_proj": tp.RowParallelLinear,
        "transformer.h.*.mlp.c_fc": tp.ColumnParallelLinear,
        "transformer.h.*.mlp.c_proj": tp.RowParallelLinear,
    }


def tensor_parallel_plan(model: Module, sequence_parallel: bool = False) -> Plan:
    """Return the plan of a model: Megatron's for a GPT, or what `hooks.plan_of` has for it."""
    if isinstance(model, GPT) and not (sequence_parallel or model.config.n_experts):
        return gpt_plan(model.config.vocab_size)
    plan: Plan = hooks.plan_of(model, sequence_parallel)
    if plan:
        return plan
    raise UsageError(f"there is no tensor-parallel plan for a {type(model).__name__}; pass one to parallelize_module")


def apply_expert_parallel(model: Module, comm: Comm, style: ExpertParallel | None = None) -> Module:
    """Shard a model's experts over `comm`. style: of each mixture, in the place of `ExpertParallel`."""
    mixtures = [name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)]
    hooks.refusals().check_mixtures(model, mixtures)
    return parallelize_module(model, comm, dict.fromkeys(mixtures, style or ExpertParallel()), axis="ep")


def apply_tensor_parallel(model: Module, comm: Comm, sequence_parallel: bool = False) -> Module:
    """Split the matrices over `comm`; with sequence_parallel norms and dropout work on 1/t of the sequence."""
    return parallelize_module(model, comm, tensor_parallel_plan(model, sequence_parallel))


def apply_context_parallel(
    model: Module, comm: Comm, length: int, attention: str = "ring", ulysses: int = 2
) -> xp.Array:
    """Split sequences of `length` tokens over `comm`; returns the positions (T_local,) of this rank's tokens.

    attention: "ring", or another name that `hooks.split_attention` knows. ulysses: how many neighbours exchange heads
    in one that has rings, too. Every attention module gets the attention as its `attention_fn`.
    """
    hooks.check_weights("apply_context_parallel", model, comm)

    # One object for all layers: it holds no state of a layer, and its messages are matched in the order of calls.
    owners = [module for module in model.modules() if hasattr(module, "attention_fn")]
    crossing = hooks.split_attention(attention, comm, length, owners[0].attention_fn, ulysses)
    crossing = crossing or RingAttention(comm, length)
    for module in owners:
        module.attention_fn = crossing

    # Position embeddings and rotary angles look up these numbers; 0..T_local-1 on every rank would be silently wrong.
    positions: xp.Array = crossing.positions()
    use_positions(model, positions)
    return positions


def use_positions(model: Any, positions: xp.Array) -> None:
    """Look up position embeddings and rotary angles at `positions`, the tokens' places in the whole text."""
    # A hook, so that it also holds in a pipeline stage, whose input does not say where its tokens are.
    table: Module = model.decoder.wpe if isinstance(model, GPT) else model.decoder.rotary_emb
    table.register_forward_pre_hook(lambda _, arguments: positions)
