"""`parallelize_module`: cut a model that was built on one device, by a plan that says how each module is split.

    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)

Every rank builds the whole model from the same seed and keeps its tiles, so the gathered tiles *are* the single-device
weights. A key is a module's qualified name and may hold `*`; what no key names stays whole on every rank. Each
parameter then carries a `Layout`, which checkpoints, clipping and counting read. The names are PyTorch's.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minidist.autograd import Parameter, Tensor
from minidist.base.errors import UsageError, check_divisible, nearest
from minidist.comm import Comm
from minidist.nn.gpt import TiedHead
from minidist.nn.layers import Dropout, Embedding, LayerNorm, RMSNorm
from minidist.nn.linear import Conv1D, Linear
from minidist.nn.module import Module
from minidist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, replica_of
from minidist.parallel.tensor.regions import copy_to_tensor_parallel_region, gather_from_sequence_parallel_region
from minidist.parallel.tensor.sequence import (
    SequenceParallelDropout,
    SequenceParallelEmbedding,
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
)
from minidist.parallel.tensor.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
    vocab_parallel_cross_entropy,
)


@dataclass
class Cutter:
    """What a style needs to know: the ranks, the mesh axis's name, the tiles made so far (for tied parameters).

    copies: modules whose tiles several neighbouring ranks hold, set by `SplitHeads` for those after it in the plan.
    """

    comm: Comm
    axis: str
    made: dict[Parameter, Parameter]
    copies: dict[str, int] = field(default_factory=dict)


class ParallelStyle:
    """How one module is split: `apply` returns what takes its place (or the module itself, changed)."""

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        raise NotImplementedError

    def expect(self, module: Any, name: str, *kinds: type) -> None:
        """An error that says which kinds of module the style is for."""
        if not isinstance(module, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise UsageError(f"{type(self).__name__} is for {wanted}; {name!r} is a {type(module).__name__}")


@dataclass
class ColwiseParallel(ParallelStyle):
    """Linear or Conv1D: output features split. An Embedding or a head without bias: words split, padded.

    blocks=3: a fused Q|K|V, cut inside each. gather_output: all ranks get all columns. sequence_parallel: the input is
    split along the sequence. copy_input=False: the module around it has prepared the input (PrepareModuleInput).
    """

    blocks: int = 1
    gather_output: bool = False
    sequence_parallel: bool = False
    copy_input: bool = True

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        self.expect(module, name, Linear, Conv1D)
        return ColumnParallelLinear.from_linear(
            module,
            cutter.comm,
            cutter.axis,
            cutter.made,
            name,
            self.blocks,
            cutter.copies.get(name, 1),
            gather_output=self.gather_output,
            sequence_parallel=self.sequence_parallel,
            copy_input=self.copy_input,
        )


@dataclass
class RowwiseParallel(ParallelStyle):
    """Linear or Conv1D: input features split. input_is_parallel, sequence_parallel: see `RowParallelLinear`."""

    input_is_parallel: bool = True
    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        self.expect(module, name, Linear, Conv1D)
        return RowParallelLinear.from_linear(
            module,
            cutter.comm,
            cutter.axis,
            cutter.made,
            name,
            input_is_parallel=self.input_is_parallel,
            sequence_parallel=self.sequence_parallel,
        )


@dataclass
class VocabParallel(ParallelStyle):
    """An Embedding, or the head that turns features into logits: words split, padded to a multiple of the ranks."""

    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        self.expect(module, name, Embedding, TiedHead, Linear)
        if isinstance(module, Embedding):
            return VocabParallelEmbedding.from_embedding(
                module, cutter.comm, cutter.axis, cutter.made, self.sequence_parallel
            )
        return VocabParallelHead(module, cutter.comm, cutter.axis, cutter.made, self.sequence_parallel)


@dataclass
class LossParallel(ParallelStyle):
    """A model with `loss_fn` and `logits_fn`: its loss is computed from split logits, its logits are gathered."""

    vocab_size: int

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        comm, vocab_size = cutter.comm, self.vocab_size
        weight = module.lm_head.weight if hasattr(module, "lm_head") else None
        if weight is None:
            raise UsageError(
                f"LossParallel is for a model with lm_head, loss_fn and logits_fn; {name!r} is a"
                f" {type(module).__name__}"
            )
        words = (weight.layout.global_shape if weight.layout else weight.shape)[0]
        if words != vocab_size:
            raise UsageError(
                f"the plan is for a vocabulary of {vocab_size} words, the model has {words}; give the plan {words}"
            )

        def loss(logits: Tensor, targets: Any, divisor: float | None = None) -> Tensor:
            return vocab_parallel_cross_entropy(logits, targets, divisor, comm=comm, vocab_size=vocab_size)

        module.loss_fn = loss
        module.logits_fn = lambda logits: gather_logits(logits, comm, vocab_size)
        return module


class SplitHeads(ParallelStyle):
    """An attention module: each rank has `heads` / t of the heads (and `kv_heads` / t of the key-value heads).

    With fewer key-value heads than ranks, t / kv_heads neighbouring ranks have the same one: those whose query heads
    read it.
    """

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        if not hasattr(module, "heads"):
            raise UsageError(f"SplitHeads is for attention; {name!r} is a {type(module).__name__} without heads")
        ranks = cutter.comm.size
        check_divisible(module.heads, f"heads of {name}", ranks, "tensor")
        module.heads //= ranks
        if hasattr(module, "kv_heads"):
            if ranks > module.kv_heads and ranks % module.kv_heads == 0:
                copies = ranks // module.kv_heads
                cutter.copies.update({f"{name}.{part}": copies for part in ("k_proj", "v_proj")})
                module.kv_heads = 1
            else:
                check_divisible(module.kv_heads, f"key-value heads of {name}", ranks, "tensor")
                module.kv_heads //= ranks
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.first = cutter.comm.rank * module.heads
        return module


@dataclass
class PrepareModuleInput(ParallelStyle):
    """The first argument of a module passes f (or the gather of the sequence) once, for all layers inside that share
    it; those get ColwiseParallel(copy_input=False)."""

    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        inner, comm, sequence_parallel = module.forward, cutter.comm, self.sequence_parallel

        def forward(x: Tensor, *rest: Any) -> Tensor:
            if sequence_parallel:
                return inner(gather_from_sequence_parallel_region(x, comm, regather=True), *rest)
            return inner(copy_to_tensor_parallel_region(x, comm), *rest)

        module.forward = forward
        return module


class SequenceParallel(ParallelStyle):
    """LayerNorm, RMSNorm, Dropout or the position Embedding: works on this rank's rows of the sequence."""

    def apply(self, module: Any, name: str, cutter: Cutter) -> Module:
        self.expect(module, name, LayerNorm, RMSNorm, Dropout, Embedding)
        if isinstance(module, Dropout):
            return SequenceParallelDropout(module, cutter.comm)
        if isinstance(module, LayerNorm):
            return SequenceParallelLayerNorm(module, cutter.comm, cutter.made)
        if isinstance(module, RMSNorm):
            return SequenceParallelRMSNorm(module, cutter.comm, cutter.made)
        return SequenceParallelEmbedding(module, cutter.comm, cutter.made)


Plan = Mapping[str, ParallelStyle | list[ParallelStyle]]


def parallelize_module(module: Module, comm: Comm, plan: Plan, axis: str = "tp") -> Module:
    """Split `module` over `comm` (`mesh["tp"]`) as `plan` says; returns the module that takes its place. Sends nothing.

    plan: {qualified name, "" for the module itself, with `*` for a part: a style or a list of them}. axis: the mesh
    axis's name, for the layouts. Raises UsageError for a name that no module has, for numbers that do not divide, for a
    tied parameter that is cut in one place only, and for a model that is flat already.
    """
    cutter = Cutter(comm, axis, {})
    for pattern, styles in plan.items():
        known = [name for name, _ in module.named_modules()]
        names = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(f"the plan names {pattern!r}, which is no module{nearest(pattern, known)}")
        for name in names:
            for style in styles if isinstance(styles, list) else [styles]:
                replaced = style.apply(get_module(module, name), name, cutter)
                module = _put(module, name, replaced)
    cut = {whole for whole, tile in cutter.made.items() if tile is not whole}
    for name, parameter in module._all_parameters():
        if parameter in cut:
            raise UsageError(
                f"{name!r} shares a parameter that the plan cuts elsewhere ({parameter.name!r}); name its module in the"
                " plan"
            )
        if parameter.layout is None:
            replica_of(parameter, cutter.made)
    return module


def get_module(module: Module, name: str) -> Any:
    """The module of a qualified name; "" is `module` itself."""
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


def gpt_plan(vocab_size: int, sequence_parallel: bool = False) -> dict[str, ParallelStyle | list[ParallelStyle]]:
    """Megatron's split of a `GPT`: heads, the inner width of the MLP, and the vocabulary.

    Per layer 4 all-reduces of (batch, T, D), two forward and two backward; with sequence_parallel 4 all-gathers and 4
    reduce-scatters, and 2 all-gathers under purpose `regather`.
    """
    sp = sequence_parallel
    plan: dict[str, ParallelStyle | list[ParallelStyle]] = {
        "": LossParallel(vocab_size),
        "transformer.wte": VocabParallel(sp),
        "lm_head": VocabParallel(sp),
        "transformer.h.*.attn": SplitHeads(),
        "transformer.h.*.attn.c_attn": ColwiseParallel(blocks=3, sequence_parallel=sp),
        "transformer.h.*.attn.c_proj": RowwiseParallel(sequence_parallel=sp),
        "transformer.h.*.mlp.c_fc": ColwiseParallel(sequence_parallel=sp),
        "transformer.h.*.mlp.c_proj": RowwiseParallel(sequence_parallel=sp),
    }
    if sp:
        for name in ("h.*.ln_1", "h.*.ln_2", "ln_f", "wpe", "drop", "h.*.attn.resid_dropout", "h.*.mlp.dropout"):
            plan[f"transformer.{name}"] = SequenceParallel()
    return plan


def llama_plan(vocab_size: int, sequence_parallel: bool = False) -> dict[str, ParallelStyle | list[ParallelStyle]]:
    """Megatron's split of a `Llama`: heads and key-value heads, the inner width, and the vocabulary.

    The three projections of an attention share one f, and the two of an MLP, so the counts are those of `gpt_plan`.
    """
    sp = sequence_parallel
    plan: dict[str, ParallelStyle | list[ParallelStyle]] = {
        "": LossParallel(vocab_size),
        "model.embed_tokens": VocabParallel(sp),
        "lm_head": VocabParallel(sp),
        "model.layers.*.self_attn": [SplitHeads(), PrepareModuleInput(sp)],
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(copy_input=False),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(sequence_parallel=sp),
        "model.layers.*.mlp": PrepareModuleInput(sp),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(copy_input=False),
        "model.layers.*.mlp.up_proj": ColwiseParallel(copy_input=False),
        "model.layers.*.mlp.down_proj": RowwiseParallel(sequence_parallel=sp),
    }
    if sp:
        for name in ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"):
            plan[f"model.{name}"] = SequenceParallel()
    return plan
