"""What a rank holds of a job's tensors, as a checkpoint takes it. A layout says it without loading what saves.

Proved by: tests/checkpoint/test_layouts.py, tests/checkpoint/test_buffers.py
"""

from typing import NamedTuple

from minidist.core.autograd.parameter import Parameter
from minidist.core.base.arrays import Array


class ReplicaId(NamedTuple):
    """This rank's number among the `size` ranks that hold the same values."""

    number: int = 0
    size: int = 1


SINGLE = ReplicaId()  # no other rank holds the same values
Buffer = tuple[str, Array, ReplicaId]  # name, values, and this rank's number among the ranks that hold them


class LocalShard(NamedTuple):
    """Elements [start, stop) of a parameter (of its tensor-parallel shard), which this rank holds as a 1-D view."""

    parameter: Parameter
    values: Array
    start: int
    stop: int
