"""Casting: gradients are sent, and added, as float16 or bfloat16, with half the bytes and fewer digits.

Proved by: tests/techniques/test_compressors.py
"""

from minidist.base.half import named_dtype
from minidist.core.base.errors import UsageError, quoted
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.gradients import Bucket
from minidist.techniques.compression.error_feedback import GradientCompressor, ring_bytes


class Cast(GradientCompressor):
    """Sends and adds gradients in 2 bytes per element: half of float32's volume. dtype: "float16" or "bfloat16".

    The mean is taken before the sum, so that float16 overflows no earlier than the gradients themselves.
    """

    settings = ("op", "dtype")

    def __init__(self, comm: Comm, dtype: str = "bfloat16", op: str = "mean") -> None:
        super().__init__(comm, op)
        if dtype not in ("float16", "bfloat16"):
            raise UsageError(f"rank {comm.rank}: a cast to {quoted(dtype)}; use float16 or bfloat16")
        self.dtype = named_dtype(dtype)

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        """Return 2 (n-1)/n of 2 B per element."""
        return ring_bytes(bucket.size, self.comm.size, rank, 2)

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do a ring all-reduce of 2 B per element."""
        # The mean comes before the sum, so that float16 does not overflow in the sum.
        gradient = bucket.buffer / bucket.buffer.dtype.type(comm.size if self.op == "mean" else 1)
        bucket.buffer[...] = all_reduce(comm, gradient.astype(self.dtype))
