"""Convolution over images: what a small image model is made of.

Proved by: tests/nn/test_convolution.py
"""

from typing import Any

from minidist.core.autograd import Parameter, Tensor
from minidist.core.base import arrays as xp
from minidist.core.nn.module import Module
from minidist.nn.ops.convolution import conv2d


class Conv2d(Module):
    """weight (out, in, size, size), bias (out,) or None: x (N, in, H, W) -> (N, out, Ho, Wo).

    Initial values as PyTorch's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        stride: int = 1,
        padding: int = 0,
        dtype: Any = xp.float32,
        seed: int | None = 0,
        bias: bool = True,
    ) -> None:
        self.stride, self.padding = stride, padding
        # PyTorch's range, 1 / sqrt(fan in).
        law = ("uniform", (in_channels * size * size) ** -0.5)
        self.weight = Parameter(xp.zeros((out_channels, in_channels, size, size), dtype), init=law)
        self.bias = Parameter(xp.zeros(out_channels, dtype), init=law) if bias else None
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in, H, W) -> (N, out, Ho, Wo)."""
        return conv2d(x, self.weight, self.bias, self.stride, self.padding)
