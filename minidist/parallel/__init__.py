"""Strategies: how ranks share the work of training one model. Each uses autograd to compute and comm to send."""

from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.flat_shards import Shard, clip_shards_, gather_tensors
from minidist.parallel.fully_shard import fully_shard, sharded_parameters, shards_of
from minidist.parallel.gradients import Bucket, GradientReducer
from minidist.parallel.host_pool import HostCopy, HostPool
from minidist.parallel.mixed_precision import MixedPrecisionPolicy
from minidist.parallel.offload import CPUOffloadPolicy, HostOptimizer, OffloadedOptimizer
from minidist.parallel.overflow import agree_on_overflow, scaled_step
from minidist.parallel.zero import ZeroOptimizer

__all__ = [
    "CPUOffloadPolicy",
    "HostCopy",
    "HostOptimizer",
    "HostPool",
    "OffloadedOptimizer",
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
