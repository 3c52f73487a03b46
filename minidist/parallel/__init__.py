"""Strategies: how ranks share the work of training one model. Each uses autograd to compute and comm to send.

dims.py                 the degrees of parallelism and their communicators
fitting_dims.py         degrees that fit a number of ranks
model_parallel.py       model parallelism applied to a whole model, one function per axis
data_parallel.py        data parallelism
gradients.py            gradients summed while backward runs
zero.py                 ZeRO 1 and 2
fsdp.py                 ZeRO 3: `fully_shard`
layer_sums.py           the norms of whole layers, for LARS and LAMB
guard.py                what may watch the ranks that train one model
replica_guard.py        refuses ranks that do not train the same model
unreduced.py            a backward pass whose gradients would not be right
whole_tensors.py        whole tensors of a sharded model
whole_matrices.py       whole matrices, for Muon
fsdp_state.py           when FSDP gathers, releases and reduces
fsdp_param_group.py     the parameters that FSDP gathers together
flat_shards.py          one rank's shard of a flat unit
mixed_precision.py      the dtypes of an FSDP unit
tensor/                 tensor parallelism
context/                context parallelism
expert/                 expert parallelism
parameter_server/       the parameter server
reduced_elements.py     how many elements a reduction sends
compressor.py           a hook that reduces buckets with fewer bytes
host_pool.py            host memory next to a device
overflow.py             agreement on whether a gradient overflowed
axes_check.py           over which ranks gradients may be summed
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

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.data_parallel import DistributedDataParallel
    from minidist.parallel.flat_shards import Shard, clip_shards_
    from minidist.parallel.fsdp import fully_shard, sharded_parameters, shards_of
    from minidist.parallel.gradients import Bucket, GradientReducer
    from minidist.parallel.host_pool import CPUOffloadPolicy, HostPool
    from minidist.parallel.layer_sums import LayerSums
    from minidist.parallel.mixed_precision import MixedPrecisionPolicy
    from minidist.parallel.overflow import agree_on_overflow, scaled_step
    from minidist.parallel.whole_matrices import WholeMatrices
    from minidist.parallel.whole_tensors import gather_tensors
    from minidist.parallel.zero import ZeroOptimizer

__all__ = [
    "CPUOffloadPolicy",
    "HostPool",
    "LayerSums",
    "WholeMatrices",
    "Bucket",
    "DistributedDataParallel",
    "GradientReducer",
    "MixedPrecisionPolicy",
    "Shard",
    "ZeroOptimizer",
    "agree_on_overflow",
    "clip_shards_",
    "fully_shard",
    "gather_tensors",
    "scaled_step",
    "sharded_parameters",
    "shards_of",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
