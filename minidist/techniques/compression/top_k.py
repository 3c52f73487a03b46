"""Top-k: few elements carry most of a gradient, so those are sent now, and the rest when it has grown.

Source: Lin et al., Deep gradient compression, ICLR 2018.
Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.limits import check_number
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.techniques.compression.error_feedback import GradientCompressor, wide


class TopK(GradientCompressor):
    """Sends only the elements of largest magnitude of each bucket; of equal ones, the first.

    NaN counts as infinite, so that all ranks see it.

    k: how many (of a bucket that has as many), or, below 1, which share of each bucket, rounded up.
    """

    by_bucket = error_feedback = True
    settings = ("op", "k")

    def __init__(self, comm: Comm, k: float, op: str = "mean") -> None:
        super().__init__(comm, op)
        check_number(f"rank {comm.rank}: top-k: k", k, above=0)
        if k > 1 and k != int(k):
            raise UsageError(
                f"rank {comm.rank}: top-k with k = {k:g}; at least 1 element must travel, or a share between 0 and 1"
            )
        self.k = k

    def kept(self, bucket: Any) -> int:
        """Return how many elements of this bucket travel."""
        size = bucket.size
        if self.k > size:
            raise UsageError(
                f"rank {self.comm.rank}: top-k with k = {self.k:.0f} > {size}, the size of bucket {bucket.index}; lower"
                " k, or raise bucket_cap_mb; with a parameter server use fewer servers"
            )
        return ceil(self.k * size) if self.k < 1 else int(self.k)

    def wire(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return k indices of 4 B and k values."""
        return [(self.kept(bucket), np.int32), (self.kept(bucket), bucket.flat.dtype)]

    def encode(self, bucket: Any) -> list[np.ndarray]:
        """Return the indices of the largest elements, and these."""
        x, k = self.corrected(bucket), self.kept(bucket)
        magnitude = xp.absolute(x)

        # NaN would sort last and never be sent.
        magnitude[xp.isnan(magnitude)] = xp.inf

        # A stable sort, so that of equal magnitudes the first are sent, the same on every run.
        largest = xp.argsort(-magnitude, kind="stable")[:k].astype(np.int32)
        values = x[largest].astype(bucket.buffer.dtype)

        # The residual is x without what is sent: of 16-bit gradients the rounding stays, too.
        x[largest] = 0 if values.dtype == x.dtype else x[largest] - values.astype(x.dtype)
        self.keep(bucket, x)
        return [largest, values]

    def decode(self, bucket: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values at their places, and zeros."""
        largest, values = parts
        result = xp.zeros(bucket.size, wide(bucket.flat.dtype), values)
        result[largest] = values.astype(result.dtype)
        return result
