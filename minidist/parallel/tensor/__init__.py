"""Tensor parallelism: every matrix is sharded over the ranks. `regions` has the borders, `layers` the two splits.

parallelize.py         `parallelize_module`: a model split by a plan
styles.py              how one module is split
llama.py               what a Llama needs in addition
layers.py              the two ways to split a product
regions.py             the borders of a region of split matrices
vocabulary.py          embedding and loss with the vocabulary split
sequence_parallel.py   norms and dropout on a part of the sequence
sharding.py            a parameter's shard
shard_boxes.py         where a shard lies in the whole parameter
full_state.py          whole arrays for a model that is sharded
shard_context.py       what a parallel style is given
grad_norm.py           the norm of the global gradient
"""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.tensor.full_state import load_full_state_dict
    from minidist.parallel.tensor.grad_norm import clip_grad_norm_
    from minidist.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
    from minidist.parallel.tensor.llama import PrepareModuleInput, llama_plan
    from minidist.parallel.tensor.parallelize import gpt_plan, mlp_plan, parallelize_module
    from minidist.parallel.tensor.regions import (
        copy_to_tensor_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_parallel_region,
        reduce_from_tensor_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_parallel_region,
    )
    from minidist.parallel.tensor.shard_boxes import boxes
    from minidist.parallel.tensor.shard_context import ShardContext
    from minidist.parallel.tensor.sharding import full_state_dict, full_tensor, local_tensor
    from minidist.parallel.tensor.styles import (
        ColwiseParallel,
        HeadParallel,
        LossParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        VocabParallel,
    )
    from minidist.parallel.tensor.vocabulary import (
        VocabParallelEmbedding,
        VocabParallelHead,
        padded_vocab_size,
        vocab_parallel_cross_entropy,
        vocab_range,
    )

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "HeadParallel",
    "LossParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardContext",
    "VocabParallel",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "boxes",
    "clip_grad_norm_",
    "copy_to_tensor_parallel_region",
    "full_state_dict",
    "full_tensor",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gpt_plan",
    "llama_plan",
    "mlp_plan",
    "load_full_state_dict",
    "padded_vocab_size",
    "parallelize_module",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "local_tensor",
    "vocab_parallel_cross_entropy",
    "vocab_range",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
