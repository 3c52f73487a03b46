"""Parameters without a gradient take part in a reduction as zeros: `find_unused_parameters=True` of a wrapper.

    rank 0   w0  w1   -      all-reduce of | w0 w1 0  |      used by some rank: a byte each, all-reduced (max)
    rank 1   w0   -   -      all-reduce of | w0 0  0  |      1 1 0: the third has no gradient afterwards

Proved by: tests/parallel/test_unused_parameters.py
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.parallel.data_parallel import Bucket, GradientReducer
from minidist.core.parallel.zero import ShardReducer


class FillingReducer(GradientReducer):
    """Parameters without a gradient take part as zeros, without asking the other ranks whether they have one."""

    unused = "fill"

    def complete(self, bucket: Bucket) -> None:
        """Let the parameters of a bucket that the loss did not use take part as zeros."""
        for parameter in bucket.parameters:
            if parameter in self.missing[bucket.index]:
                parameter.zero_fill()


class ZerosReducer(FillingReducer):
    """Where no rank has a gradient of a parameter, it has none afterwards: asks with one byte per parameter."""

    unused = "zeros"

    def finished(self) -> None:
        """Wait for every bucket; forget the zeros of parameters that no rank has used."""
        if not self._taking_part:
            super().finished()
            return
        # Whose gradients this rank brings, of this pass or of those under `no_sync`.
        parameters, late = list(self.bucket_of), set[Parameter]().union(*self.missing)
        mine = {p for p in parameters if p not in late or p.gradient.local is not None}
        fresh = [p for p in parameters if p.gradient.total is None]
        super().finished()
        self.note_used(used_anywhere(self.comm, parameters, mine), fresh)

    def note_used(self, used: set[Parameter], fresh: Iterable[Parameter]) -> None:
        """Forget the zeros of parameters that no rank has used. fresh: those without a sum of earlier passes."""
        for parameter in fresh:
            if parameter not in used:
                parameter.gradient.clear()


class ZerosShardReducer(ZerosReducer, ShardReducer):
    """The same with sharded gradients."""

    def note_used(self, used: set[Parameter], fresh: Iterable[Parameter]) -> None:
        """Let the shard know which parameters have a gradient on some rank, in one more backward pass."""
        self.shard.used = used | (self.shard.used or set())


def used_anywhere(comm: Comm, parameters: Sequence[Parameter], used: Collection[Parameter]) -> set[Parameter]:
    """Return which parameters some rank has used; used: those of this rank. An all-reduce of a byte per parameter."""
    bits = np.array([parameter in used for parameter in parameters], np.uint8)
    with purpose("gradient_reduce"):
        all_reduce(comm, bits, "max")
    return {parameter for parameter, bit in zip(parameters, bits, strict=True) if bit}
