"""How many elements all ranks together send per reduction of a gradient, by the closed form of the algorithm.

Proved by: tests/train/test_reduction.py
"""

import numpy as np

from minidist.collectives.closed_forms import elements_sent
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.core.parallel.fsdp import FSDPUnit
from minidist.core.parallel.zero import ShardReducer


def of_reducer(reducer: GradientReducer) -> int:
    """Return the elements for the whole gradient of data parallelism, of ZeRO 1 or of ZeRO 2."""
    itemsize, sent = reducer.flat.dtype.itemsize, 0
    for bucket in reducer.buckets:
        # A bucket that is reduce-scattered has a chunk for each owner.
        elements = reducer.shard.counts(bucket.slice) if isinstance(reducer, ShardReducer) else bucket.size
        sent += elements_sent(reducer.comm, reducer.operation, reducer.algorithm, elements, itemsize)
    return sent


def of_unit(unit: FSDPUnit) -> int:
    """Return the elements for the gradient of a unit of ZeRO 3."""
    dtype = getattr(unit, "reduce_dtype", unit.shard.dtype)
    shard, itemsize, copies = unit.shard, np.dtype(dtype).itemsize, 1
    sent = 0
    replicas, algorithm = getattr(unit, "replicas", None), unit.algorithm
    if replicas is not None:
        copies = replicas.size
        sent = shard.comm.size * elements_sent(replicas, "all_reduce", algorithm, shard.size, itemsize)
    counts = [shard.size] * shard.comm.size
    return sent + copies * elements_sent(shard.comm, "reduce_scatter", algorithm, counts, itemsize)
