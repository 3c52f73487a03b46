"""Splitting the layer: every matrix in tiles, one a rank. `regions` has the borders, `linear` the two cuts."""

from minidist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from minidist.parallel.tensor.plan import (
    ColwiseParallel,
    LossParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    SplitHeads,
    VocabParallel,
    gpt_plan,
    llama_plan,
    parallelize_module,
)
from minidist.parallel.tensor.regions import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from minidist.parallel.tensor.replicas import check_replicas, clip_grad_norm_
from minidist.parallel.tensor.shards import boxes, full_state_dict, full_tensor, load_full_state_dict, tile_in
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
    "LossParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "SplitHeads",
    "VocabParallel",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "boxes",
    "check_replicas",
    "clip_grad_norm_",
    "copy_to_tensor_parallel_region",
    "full_state_dict",
    "full_tensor",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gpt_plan",
    "llama_plan",
    "load_full_state_dict",
    "padded_vocab_size",
    "parallelize_module",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "tile_in",
    "vocab_parallel_cross_entropy",
    "vocab_range",
]
