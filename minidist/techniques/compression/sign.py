"""SignSGD: one bit per element, its sign, and one magnitude for the whole bucket.

Source: Karimireddy et al., Error feedback fixes SignSGD, ICML 2019.
Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.techniques.compression.error_feedback import GradientCompressor, wide


class Sign(GradientCompressor):
    """Sends one bit per element and one number per bucket, the mean magnitude. Zero counts as positive."""

    by_bucket = error_feedback = True

    def wire(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return a value, and d/8 B."""
        return [(1, wide(bucket.flat.dtype)), (-(-bucket.size // 8), np.uint8)]

    def encode(self, bucket: Any) -> list[np.ndarray]:
        """Return the mean magnitude, (1,), so that the sum of |x| is kept, and eight signs in each byte."""
        x = self.corrected(bucket)
        scale = xp.absolute(x).sum(keepdims=True) / x.dtype.type(x.size)
        signs = xp.packbits(x >= 0)
        self.keep(bucket, x - signed(signs, scale, x.size))
        return [scale, signs]

    def decode(self, bucket: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return +scale and -scale."""
        scale, signs = parts
        return signed(signs, scale, bucket.size)


def signed(bits: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    """Return packed signs and a magnitude as an array of +scale and -scale."""
    return xp.where(xp.unpackbits(bits)[:size].view(bool), scale, -scale)
