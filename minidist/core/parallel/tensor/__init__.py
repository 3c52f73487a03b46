"""Tensor parallelism: every matrix is sharded over the ranks. `regions` has the borders, `layers` the two splits.

parallelize.py         `parallelize_module`: a model split by a plan
styles.py              how one module is split
layers.py              the two ways to split a product
regions.py             the borders of a region of split matrices
vocabulary.py          embedding and loss with the vocabulary split
sequence_parallel.py   norms and dropout on a part of the sequence
sharding.py            a parameter's shard
shard_context.py       what a parallel style is given
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.parallel.tensor.layers import ColumnParallelLinear as ColumnParallelLinear
    from minidist.core.parallel.tensor.layers import RowParallelLinear as RowParallelLinear
    from minidist.core.parallel.tensor.parallelize import gpt_plan as gpt_plan
    from minidist.core.parallel.tensor.parallelize import mlp_plan as mlp_plan
    from minidist.core.parallel.tensor.parallelize import parallelize_module as parallelize_module
    from minidist.core.parallel.tensor.regions import copy_to_tensor_parallel_region as copy_to_tensor_parallel_region
    from minidist.core.parallel.tensor.regions import (
        gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
    )
    from minidist.core.parallel.tensor.regions import (
        gather_from_tensor_parallel_region as gather_from_tensor_parallel_region,
    )
    from minidist.core.parallel.tensor.regions import (
        reduce_from_tensor_parallel_region as reduce_from_tensor_parallel_region,
    )
    from minidist.core.parallel.tensor.regions import (
        reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
    )
    from minidist.core.parallel.tensor.regions import (
        scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
    )
    from minidist.core.parallel.tensor.regions import (
        scatter_to_tensor_parallel_region as scatter_to_tensor_parallel_region,
    )
    from minidist.core.parallel.tensor.shard_context import ShardContext as ShardContext
    from minidist.core.parallel.tensor.styles import ColwiseParallel as ColwiseParallel
    from minidist.core.parallel.tensor.styles import HeadParallel as HeadParallel
    from minidist.core.parallel.tensor.styles import LossParallel as LossParallel
    from minidist.core.parallel.tensor.styles import ParallelStyle as ParallelStyle
    from minidist.core.parallel.tensor.styles import RowwiseParallel as RowwiseParallel
    from minidist.core.parallel.tensor.styles import SequenceParallel as SequenceParallel
    from minidist.core.parallel.tensor.styles import VocabParallel as VocabParallel
    from minidist.core.parallel.tensor.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
    from minidist.core.parallel.tensor.vocabulary import VocabParallelHead as VocabParallelHead
    from minidist.core.parallel.tensor.vocabulary import padded_vocab_size as padded_vocab_size
    from minidist.core.parallel.tensor.vocabulary import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from minidist.core.parallel.tensor.vocabulary import vocab_range as vocab_range
__getattr__, __dir__ = lazy_imports(__name__, __file__)
