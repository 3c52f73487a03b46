"""SignSGD: one bit per element, its sign, and one magnitude for the whole bucket.

Source: Karimireddy et al., Error feedback fixes SignSGD, ICML 2019.
Proved by: tests/techniques/test_compressors.py
"""

import numpy as np

from minidist.base import arrays as xp
from minidist.core.collectives import all_gather
from minidist.core.comm import PointToPoint
from minidist.core.parallel.gradients import Bucket
from minidist.techniques.compression.error_feedback import GradientCompressor, gather_bytes, wide


class Sign(GradientCompressor):
    """Sends one bit per element and one number per bucket, the mean magnitude. Zero counts as positive."""

    error_feedback = True

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        """Return (n-1) (d/8 B + a value)."""
        return gather_bytes(-(-bucket.size // 8) + wide(bucket.flat.dtype).itemsize, self.comm.size)

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do two ring all-gathers: ceil(d / 8) B of signs and one value from each rank."""
        x = self.corrected(bucket)

        # The scale (1,) is the mean magnitude, so the sum of |x| is kept. Eight signs are packed into a byte.
        scale = xp.absolute(x).sum(keepdims=True) / x.dtype.type(x.size)
        signs = xp.packbits(x >= 0)
        self.keep(bucket, x - signed(signs, scale, x.size))

        # Every rank adds all ranks' signs in rank order, so all get the same bits.
        scales, bits = all_gather(comm, scale), all_gather(comm, signs)
        total = xp.zeros_like(x)
        for rank in range(comm.size):
            total += signed(bits[rank * signs.size : (rank + 1) * signs.size], scales[rank : rank + 1], x.size)
        self.finish(bucket, total)


def signed(bits: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    """Return packed signs and a magnitude as an array of +scale and -scale."""
    return xp.where(xp.unpackbits(bits)[:size].view(bool), scale, -scale)
