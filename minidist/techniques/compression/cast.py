"""Casting: gradients are sent, and added, as float16 or bfloat16, with half the bytes and fewer digits.

Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base.half import named_dtype
from minidist.core.base.errors import UsageError, quoted
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.data_parallel import Bucket
from minidist.techniques.compression.error_feedback import GradientCompressor


class Cast(GradientCompressor):
    """Sends and adds gradients in 2 bytes per element: half of float32's volume. dtype: "float16" or "bfloat16".

    The mean is taken before the sum, so that float16 overflows no earlier than the gradients themselves.
    """

    ring = True
    settings = ("op", "dtype")

    def __init__(self, comm: Comm, dtype: str = "bfloat16", op: str = "mean") -> None:
        super().__init__(comm, op)
        if dtype not in ("float16", "bfloat16"):
            raise UsageError(f"rank {comm.rank}: a cast to {quoted(dtype)}; use float16 or bfloat16")
        self.dtype = named_dtype(dtype)

    def wire(self, bucket: Bucket) -> list[tuple[int, Any]]:
        """Return 2 B per element."""
        return [(bucket.size, self.dtype)]

    def encode(self, bucket: Bucket) -> list[np.ndarray]:
        """Return the gradient, or its part of the mean, cast."""
        # The mean comes before the sum, so that float16 does not overflow in the sum.
        gradient = bucket.buffer / bucket.buffer.dtype.type(self.comm.size if self.op == "mean" else 1)
        return [gradient.astype(self.dtype)]

    def decode(self, bucket: Bucket, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the numbers in the dtype of the gradient."""
        return parts[0].astype(bucket.flat.dtype)

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do a ring all-reduce of 2 B per element."""
        (gradient,) = self.encode(bucket)
        bucket.buffer[...] = all_reduce(comm, gradient)
