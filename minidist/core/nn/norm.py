"""Layer norm and RMS norm: each vector gets a fixed scale, so that deep models train.

Sources: Ba et al., "Layer Normalization", 2016; Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019.

Proved by: tests/nn/test_modules.py, tests/nn/test_against_torch.py
"""

from typing import Any

from minidist.core.autograd import Parameter, Tensor, layer_norm, rms_norm
from minidist.core.base import arrays as xp
from minidist.core.nn.module import Module


class LayerNorm(Module):
    """Normalises the last dim, then scales and shifts: weight and bias (features,)."""

    def __init__(self, features: int, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        self.eps = eps
        self.weight = Parameter(xp.ones(features, dtype), init=("constant", 1.0))
        self.bias = Parameter(xp.zeros(features, dtype), init=("constant", 0.0))
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Divides by the root mean square of the last dim, then scales: weight (features,)."""

    def __init__(self, features: int, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        self.eps = eps
        self.weight = Parameter(xp.ones(features, dtype), init=("constant", 1.0))
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        return rms_norm(x, self.weight, self.eps)
