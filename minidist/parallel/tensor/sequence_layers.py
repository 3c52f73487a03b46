"""The layers of tensor parallelism with the sequence split between their regions, and Megatron's plan with them.

    tensor parallel     f [W columns] [W rows] g                           f, g: all-reduces of (batch, T, D)
    sequence parallel   all-gather [W columns] [W rows] reduce-scatter     the same bytes, and 1/t of the rows between

A layer differs from the core's in how its input enters the region or its output leaves it. Its input is gathered again
in backward (purpose `regather`), so that each rank keeps its own rows only.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.

Proved by: tests/parallel/test_tensor.py
"""

from functools import partial
from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.parallel import model_parallel, tensor_parallel
from minidist.core.parallel.model_parallel import Styles
from minidist.core.parallel.tensor_parallel import (
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_to_tensor_parallel_region,
)
from minidist.parallel.tensor.gathering import ColumnParallelLinear
from minidist.parallel.tensor.sequence_parallel import SequenceParallel
from minidist.parallel.tensor.sequence_regions import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class SequenceColumnParallelLinear(ColumnParallelLinear):
    """x (batch, T/t, in) on each rank is gathered first: a reduce-scatter and a regather in backward."""

    def enter(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks."""
        return gather_from_sequence_parallel_region(x, self.comm, regather=True)


class SequenceRowParallelLinear(RowParallelLinear):
    """y is reduce-scattered to this rank's rows (batch, T/t, out): an all-gather in backward."""

    def leave(self, y: Tensor) -> Tensor:
        """Sum the summands of all ranks, keep this rank's rows of the sum, and add the bias to these."""
        y = reduce_scatter_to_sequence_parallel_region(y, self.comm)
        # Each rank adds the bias to its own rows only, so the bias's gradient is summed over the ranks.
        return y if self.bias is None else y + copy_to_tensor_parallel_region(self.bias, self.comm)


class SequenceVocabParallelEmbedding(VocabParallelEmbedding):
    """Integers (batch, T) on all ranks -> this rank's rows (batch, T/t, width): an all-gather in backward."""

    def leave(self, rows: Tensor) -> Tensor:
        """Sum the summands of all ranks, and keep this rank's rows of the sum."""
        return reduce_scatter_to_sequence_parallel_region(rows, self.comm)


class SequenceVocabParallelHead(VocabParallelHead):
    """x (batch, T/t, width) on each rank is gathered first: a reduce-scatter and a regather in backward."""

    def enter(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks."""
        return gather_from_sequence_parallel_region(x, self.comm, regather=True)


SPLIT: dict[Any, Any] = {
    tensor_parallel.ColumnParallelLinear: SequenceColumnParallelLinear,
    ColumnParallelLinear: SequenceColumnParallelLinear,
    RowParallelLinear: SequenceRowParallelLinear,
    VocabParallelEmbedding: SequenceVocabParallelEmbedding,
    VocabParallelHead: SequenceVocabParallelHead,
}


def split_sequence(plan: Styles, *parts: str) -> Styles:
    """Return a plan whose regions begin and end with the sequence split; `parts`: what works on rows in between."""
    return {name: _split(style) for name, style in plan.items()} | {name: SequenceParallel() for name in parts}


def _split(style: Any) -> Any:
    if isinstance(style, list):
        return [_split(each) for each in style]
    if isinstance(style, partial):
        return partial(_split(style.func), *style.args, **style.keywords)
    return SPLIT.get(style, style) if isinstance(style, type) else style


def gpt_plan(vocab_size: int, sequence_parallel: bool = False) -> Styles:
    """Return Megatron's split of a `GPT`: see `minidist.core.parallel.model_parallel.gpt_plan`.

    With sequence_parallel 4 all-gathers and 4 reduce-scatters per layer take the place of its 4 all-reduces, and there
    are 2 all-gathers under purpose `regather`.
    """
    plan = model_parallel.gpt_plan(vocab_size)
    if not sequence_parallel:
        return plan
    # Whatever lies between two regions works on this rank's rows.
    names = ("h.*.ln_1", "h.*.ln_2", "ln_f", "wpe", "drop", "h.*.attn.resid_dropout", "h.*.mlp.dropout")
    return split_sequence(plan, *(f"transformer.{name}" for name in names))
