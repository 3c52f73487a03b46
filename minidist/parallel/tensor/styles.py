"""How one module is split: each style replaces a module by its parallel class, or hooks its forward.

    ColwiseParallel      Linear, Conv1D      -> ColumnParallelLinear
    RowwiseParallel      Linear, Conv1D      -> RowParallelLinear
    VocabParallel        Embedding, head     -> VocabParallelEmbedding, VocabParallelHead
    LossParallel         a model's loss_fn and logits_fn -> those of a split vocabulary
    HeadParallel         an attention: its dropout draws the masks of this rank's heads

Each refuses modules of other kinds. The names are PyTorch's (torch.distributed.tensor.parallel), where it has them.

Proved by: tests/parallel/test_tensor.py
"""

from dataclasses import dataclass
from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn.gpt import LanguageModel, TiedHead
from minidist.core.nn.layers import Conv1D, Embedding, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, split_heads
from minidist.core.parallel.tensor.sharding import ShardContext
from minidist.core.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabParallelHead, split_loss
from minidist.nn.dropout import AttentionDropout
from minidist.parallel.tensor.sequence_regions import scatter_to_tensor_parallel_region


class ParallelStyle:
    """How one module is split: `apply` returns what takes its place (or the module itself, with hooks)."""

    def __call__(self, module: Any, context: ShardContext, name: str) -> Module:
        """Do what `apply` does, for `parallelize_module`."""
        return self.apply(module, name, context)

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

    blocks=3: a fused Q|K|V, split inside each. gather_output: all ranks get all columns.
    """

    blocks: int = 1
    gather_output: bool = False

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a ColumnParallelLinear."""
        self.expect(module, name, Linear, Conv1D)
        return ColumnParallelLinear(module, context, name, **vars(self))


@dataclass
class RowwiseParallel(ParallelStyle):
    """Linear or Conv1D: input features split. input_is_parallel=False: x is whole, and own columns are taken first."""

    input_is_parallel: bool = True

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a RowParallelLinear."""
        self.expect(module, name, Linear, Conv1D)
        if module.activation is not None:
            raise UsageError(
                f"{name} has activation {module.activation!r}, which cannot be applied to the summands of a"
                " row-parallel layer; give it ColwiseParallel, or take the activation out"
            )
        return (RowParallelLinear if self.input_is_parallel else WholeInputRowParallelLinear)(module, context, name)


class WholeInputRowParallelLinear(RowParallelLinear):
    """A row-parallel layer whose input x (..., in) is whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return super().forward(scatter_to_tensor_parallel_region(x, self.comm))


class VocabParallel(ParallelStyle):
    """An Embedding, or the head that turns features into logits: words split, padded to a multiple of the ranks."""

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return a VocabParallelEmbedding or a VocabParallelHead."""
        self.expect(module, name, Embedding, TiedHead, Linear)
        if getattr(module, "bias", None) is not None:
            raise UsageError(f"the head {module.name!r} has a bias; a vocabulary-parallel head has none")
        return (VocabParallelEmbedding if isinstance(module, Embedding) else VocabParallelHead)(module, context)


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

        return split_loss(module, context, name, vocab_size=self.vocab_size)


class HeadParallel(ParallelStyle):
    """An attention module: each rank has 1/t of the heads.

    The module takes its number of heads from its projections, which the plan splits over the ranks.
    """

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the attention with the dropout of its heads."""
        dropout = getattr(module, "attn_dropout", None)
        if not isinstance(dropout, AttentionDropout):
            raise UsageError(f"HeadParallel is for attention; {name!r} is a {type(module).__name__} without heads")
        return split_heads(module, context, name)
