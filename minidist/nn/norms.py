"""RMS norm, which gives each vector a fixed scale, without taking its mean away.

Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019.

Proved by: tests/nn/test_llama.py
"""

from typing import Any

from minidist.base.limits import check_whole
from minidist.core.autograd import Parameter, Tensor
from minidist.core.base import arrays as xp
from minidist.core.nn.module import Module
from minidist.nn.ops.rms_norm import rms_norm


class RMSNorm(Module):
    """Divides by the root mean square of the last dim, then scales: weight (features,)."""

    def __init__(self, features: int, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        self.eps = eps
        self.weight = Parameter(xp.full(check_whole("features", features), 1, dtype), init=("constant", 1.0))
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        return rms_norm(x, self.weight, self.eps)
