"""How one module is split: each style replaces a module by its parallel class, or hooks its forward.

    ColwiseParallel      Linear, Conv1D      -> ColumnParallelLinear
    RowwiseParallel      Linear, Conv1D      -> RowParallelLinear
    VocabParallel        Embedding, head     -> VocabParallelEmbedding, VocabParallelHead
    LossParallel         a model's loss_fn and logits_fn -> those of a split vocabulary
    HeadParallel         an attention: its dropout draws the masks of this rank's heads
    PrepareModuleInput   a module with a forward pre-hook: f, or the gather of the sequence
    SequenceParallel     LayerNorm, RMSNorm, Dropout, Embedding -> their classes for a part of the sequence

The names are PyTorch's (torch.distributed.tensor.parallel), where it has them.

Proved by: tests/parallel/test_tensor.py
"""

from dataclasses import dataclass
from typing import Any

from minidist.autograd import Tensor
from minidist.base.errors import UsageError, check_divisible
from minidist.comm import Comm
from minidist.nn.dropout import AttentionDropout, Dropout
from minidist.nn.embedding import Embedding
from minidist.nn.language_model import LanguageModel, TiedHead
from minidist.nn.linear import Conv1D, Linear
from minidist.nn.module import Module
from minidist.nn.norm import LayerNorm, RMSNorm
from minidist.parallel.tensor.layers import ColumnParallelLinear, HeadParallelDropout, RowParallelLinear
from minidist.parallel.tensor.regions import copy_to_tensor_parallel_region, gather_from_sequence_parallel_region
from minidist.parallel.tensor.sequence_parallel import (
    SequenceParallelDropout,
    SequenceParallelEmbedding,
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
)
from minidist.parallel.tensor.shard_context import ShardContext
from minidist.parallel.tensor.vocabulary import (
    GatherLogits,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelHead,
)


class ParallelStyle:
    """How one module is split: `apply` returns what takes its place (or the module itself, with hooks)."""

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return what takes the place of `module`, which has the qualified name `name`."""
        raise NotImplementedError

    def expect(self, module: Any, name: str, *kinds: type) -> None:
        """Raise UsageError, saying which kinds of module the style is for, unless `module` is one of them."""
        if not isinstance(module, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise UsageError(f"{type(self).__name__} is for {wanted}; {name!r} is a {type(module).__name__}")


@dataclass
class ColwiseParallel(ParallelStyle):
    """Linear or Conv1D: output features split.

    blocks=3: a fused Q|K|V, split inside each. gather_output: all ranks get all columns. sequence_parallel: the input
    is split along the sequence. copy_input=False: the module around it has prepared the input (PrepareModuleInput).
    """

    blocks: int = 1
    gather_output: bool = False
    sequence_parallel: bool = False
    copy_input: bool = True

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a ColumnParallelLinear."""
        self.expect(module, name, Linear, Conv1D)
        return ColumnParallelLinear.from_linear(
            module,
            context,
            name,
            blocks=self.blocks,
            replicas=context.kv_replicas.get(name, 1),
            gather_output=self.gather_output,
            sequence_parallel=self.sequence_parallel,
            copy_input=self.copy_input,
        )


@dataclass
class RowwiseParallel(ParallelStyle):
    """Linear or Conv1D: input features split. input_is_parallel, sequence_parallel: see `RowParallelLinear`."""

    input_is_parallel: bool = True
    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a RowParallelLinear."""
        self.expect(module, name, Linear, Conv1D)
        return RowParallelLinear.from_linear(
            module, context, name, input_is_parallel=self.input_is_parallel, sequence_parallel=self.sequence_parallel
        )


@dataclass
class VocabParallel(ParallelStyle):
    """An Embedding, or the head that turns features into logits: words split, padded to a multiple of the ranks."""

    sequence_parallel: bool = False

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a VocabParallelEmbedding or a VocabParallelHead."""
        self.expect(module, name, Embedding, TiedHead, Linear)
        make = VocabParallelEmbedding.from_embedding if isinstance(module, Embedding) else VocabParallelHead
        return make(module, context, self.sequence_parallel)


@dataclass
class LossParallel(ParallelStyle):
    """A language model: its loss is computed from split logits, and its logits are gathered."""

    vocab_size: int

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the model with its `loss_fn` and `logits_fn` replaced."""
        if not isinstance(module, LanguageModel):
            raise UsageError(
                f"LossParallel is for a model with lm_head, loss_fn and logits_fn; {name!r} is a"
                f" {type(module).__name__}"
            )

        # The head's weight may be a shard already; its layout knows the number of words.
        weight = module.lm_head.weight
        words = (weight.layout.global_shape if weight.layout else weight.shape)[0]
        if words != self.vocab_size:
            raise UsageError(
                f"the plan is for a vocabulary of {self.vocab_size} words, the model has {words}; give the plan {words}"
            )
        module.loss_fn = VocabParallelCrossEntropy(context.comm, self.vocab_size)
        module.logits_fn = GatherLogits(context.comm, self.vocab_size)
        return module


class HeadParallel(ParallelStyle):
    """An attention module: each rank has 1/t of the heads, and 1/t of the key-value heads.

    With fewer key-value heads than ranks, t / kv_heads neighbouring ranks have the same one: those whose query heads
    read it. The module takes its numbers of heads from its projections, which the plan splits over the ranks.
    """

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the attention with the dropout of its own heads."""
        dropout = getattr(module, "attn_dropout", None)
        if not isinstance(dropout, AttentionDropout):
            raise UsageError(f"HeadParallel is for attention; {name!r} is a {type(module).__name__} without heads")
        ranks, heads = context.comm.size, dropout.heads
        check_divisible(heads, f"heads of {name}", ranks, "tensor")

        # Projections that are not fused (Llama) may have fewer key-value heads than ranks: the heads are then shared by
        # neighbours, which the styles of k_proj and v_proj read from the context.
        if hasattr(module, "k_proj"):
            kv_heads = module.k_proj.out_features // module.head_size
            if ranks > kv_heads and ranks % kv_heads == 0:
                context.kv_replicas |= {f"{name}.{part}": ranks // kv_heads for part in ("k_proj", "v_proj")}
            else:
                check_divisible(kv_heads, f"key-value heads of {name}", ranks, "tensor")
        module.attn_dropout = HeadParallelDropout(dropout, context.comm)
        return module  # type: ignore[no-any-return]


@dataclass
class PrepareModuleInput(ParallelStyle):
    """The first argument of a module passes f (or the gather of the sequence) once, for all layers that share it.

    Those layers get ColwiseParallel(copy_input=False).
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


class SequenceParallel(ParallelStyle):
    """LayerNorm, RMSNorm, Dropout or the position Embedding: works on this rank's rows of the sequence."""

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the module's class for a part of the sequence."""
        self.expect(module, name, LayerNorm, RMSNorm, Dropout, Embedding)
        if isinstance(module, Dropout):
            return SequenceParallelDropout(module, context.comm)
        if isinstance(module, LayerNorm):
            return SequenceParallelLayerNorm(module, context)
        if isinstance(module, RMSNorm):
            return SequenceParallelRMSNorm(module, context)
        return SequenceParallelEmbedding(module, context)
