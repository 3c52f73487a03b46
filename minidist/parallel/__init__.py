"""What divides or watches a model in addition to the core: offload, precision, checks.

assignment.py           which rank holds which whole items
fitting_dims.py         degrees that fit a number of ranks
layer_sums.py           the norms of whole layers, for LARS and LAMB
replica_guard.py        refuses ranks that do not train the same model
unreduced.py            a backward pass whose gradients would not be right
whole_tensors.py        whole tensors of a sharded model
whole_matrices.py       whole matrices, for Muon
fsdp_options.py         further options of `fully_shard`
mixed_precision.py      the dtypes of an FSDP unit
tensor/                 tensor parallelism
context/                context parallelism
expert/                 expert parallelism
reduced_elements.py     how many elements a reduction sends
data_parallel.py        data parallelism with further options
zero.py                 ZeRO 1 and 2 with further options
unused.py               parameters without a gradient take part as zeros
shards.py               clipping and places of shards
comm_hooks.py            a hook in place of the reduction of a bucket
compressor.py           a hook that reduces buckets with fewer bytes
host_pool.py            host memory next to a device
overflow.py             agreement on whether a gradient overflowed
sharding_check.py       whether a sharded module goes with what it has inside
layout_check.py         types of results over the tensor axis
redistribute.py         tensors move to the ranks that hold them in another layout
replica_check.py        whether all copies of a parameter have the same bits
running_statistics.py   running statistics of batch normalisation over all ranks
sync_batch_norm.py      batch normalisation over the rows of all ranks
volume.py               how much the layers of model parallelism send
weights_check.py        whether all ranks split the same model
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.host_pool import CPUOffloadPolicy, HostPool
    from minidist.parallel.layer_sums import LayerSums
    from minidist.parallel.mixed_precision import MixedPrecisionPolicy
    from minidist.parallel.overflow import agree_on_overflow, scaled_step
    from minidist.parallel.whole_matrices import WholeMatrices
    from minidist.parallel.whole_tensors import gather_tensors

__all__ = [
    "CPUOffloadPolicy",
    "HostPool",
    "LayerSums",
    "WholeMatrices",
    "MixedPrecisionPolicy",
    "agree_on_overflow",
    "gather_tensors",
    "scaled_step",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
