"""A communication hook that replaces the reduction of a bucket of gradients by one with fewer bytes.

    ddp.register_comm_hook(state, compress)       state: a `Compressor`, whose `reduce` sends and adds

minidist/techniques has the compressors.

Proved by: tests/techniques/test_compressors.py
"""

import numpy as np

from minidist.base.errors import UsageError, quoted
from minidist.core.comm import Comm, PointToPoint, Work
from minidist.core.parallel.data_parallel import Bucket


def compress(state: "Compressor", bucket: Bucket) -> Work:
    """Reduce the bucket compressed, in a separate stream; the hook of `ddp.register_comm_hook(state, compress)`."""
    # A separate call, so that all ranks match it, and a separate stream, so that backward goes on meanwhile.
    settings = "".join(f", {name} {getattr(state, name)}" for name in state.settings)
    equal = bucket.guard.of_bucket(bucket) or ""  # nothing where the bucket has no guard
    call = state.comm.collective(f"compress/{type(state).__name__}", equal + settings)
    return call.run_async(lambda: state.reduce(call, bucket))


class Compressor:
    """The base of all compressors. op: "mean" (PyTorch's) or "sum", as in `DistributedDataParallel(reduction=)`."""

    settings: tuple[str, ...] = ("op",)  # attributes that must be equal on all ranks, compared with each message

    def __init__(self, comm: Comm, op: str = "mean") -> None:
        if op not in ("mean", "sum"):
            raise UsageError(f"rank {comm.rank}: compression with op {quoted(op)}; it must be 'mean' or 'sum'")
        self.comm, self.op = comm, op

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Replace the bucket's gradient by the sum (or mean) over all ranks of the compressed ones."""
        raise NotImplementedError

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        """Return the bytes that rank `rank` sends for this bucket, in closed form."""
        raise NotImplementedError

    def finish(self, bucket: Bucket, total: np.ndarray) -> None:
        """Put the sum, or the mean, into the bucket."""
        bucket.buffer[...] = total / total.dtype.type(self.comm.size) if self.op == "mean" else total
