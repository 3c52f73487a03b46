"""Strategies: how ranks share the work of training one model. Each uses autograd to compute and comm to send.

dims.py                 the degrees of parallelism and their communicators
model_parallel.py       model parallelism applied to a whole model, one function per axis
data_parallel.py        data parallelism
gradients.py            gradients summed while backward runs
zero.py                 ZeRO 1 and 2
fsdp.py                 ZeRO 3: `fully_shard`
guard.py                what may watch the ranks that train one model
fsdp_state.py           when FSDP gathers, releases and reduces
fsdp_unit.py     the parameters that FSDP gathers together
flat_shards.py          one rank's shard of a flat unit
tensor/                 tensor parallelism
context/                context parallelism
expert/                 expert parallelism
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.parallel.data_parallel import DistributedDataParallel
    from minidist.core.parallel.flat_shards import Shard, clip_shards_
    from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
    from minidist.core.parallel.gradients import Bucket, GradientReducer
    from minidist.core.parallel.zero import ZeroOptimizer

__all__ = [
    "Bucket",
    "DistributedDataParallel",
    "GradientReducer",
    "Shard",
    "ZeroOptimizer",
    "clip_shards_",
    "fully_shard",
    "sharded_parameters",
    "shards_of",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
