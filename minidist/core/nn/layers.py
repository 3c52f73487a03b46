"""Layers, and the multilayer perceptron: the smallest model on which every strategy can be understood and checked.

Proved by: tests/nn/test_modules.py, tests/nn/test_against_torch.py
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.core.autograd import Parameter, Tensor, embedding, layer_norm
from minidist.core.autograd.ops.linear import linear
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.nn.module import Module, Sequential


class Linear(Module):
    """y = activation(x W^T + b): x (..., in), weight (out, in), bias (out,), y (..., out).

    Initial values as PyTorch's: uniform in +-1/sqrt(in). seed=None leaves zeros for the model's `initialize` to fill.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        dtype: Any = xp.float32,
        seed: int | None = 0,
    ) -> None:
        self.in_features = hooks.check_whole("in_features", in_features)
        self.out_features = hooks.check_whole("out_features", out_features)
        self.activation = activation
        # PyTorch's range, 1 / sqrt(fan in), for the bias too.
        law = ("uniform", in_features**-0.5 if in_features else 0.0)
        self.weight = Parameter(xp.zeros((out_features, in_features), dtype), init=law)
        self.bias = Parameter(xp.zeros(out_features, dtype), init=law) if bias else None
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.activation)


class Conv1D(Module):
    """y = activation(x W + b) with the weight stored as (in, out), as in GPT-2's state dict."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str | None = None,
        dtype: Any = xp.float32,
        scale: float = 0.02,
        seed: int | None = 0,
    ) -> None:
        self.in_features = hooks.check_whole("in_features", in_features)
        self.out_features = hooks.check_whole("out_features", out_features)
        self.activation = activation
        self.weight = Parameter(xp.zeros((in_features, out_features), dtype), init=("normal", scale))
        self.bias = Parameter(xp.zeros(out_features, dtype), init=("constant", 0.0))
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.activation, weight_is_in_out=True)


class Embedding(Module):
    """Row look-up: weight (num_embeddings, embedding_dim), indices (...) -> (..., embedding_dim)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: Any = xp.float32, scale: float = 1.0, seed: int | None = 0
    ) -> None:
        shape = hooks.check_whole("num_embeddings", num_embeddings), hooks.check_whole("embedding_dim", embedding_dim)
        self.weight = Parameter(xp.zeros(shape, dtype), init=("normal", scale))
        self.initialize(seed)

    def forward(self, indices: Any) -> Tensor:
        return embedding(indices, self.weight)


class LayerNorm(Module):
    """Normalises the last dim of x (..., features), then scales and shifts: weight and bias (features,)."""

    def __init__(self, features: int, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        self.eps = eps
        self.weight = Parameter(xp.full(hooks.check_whole("features", features), 1, dtype), init=("constant", 1.0))
        self.bias = Parameter(xp.zeros(features, dtype), init=("constant", 0.0))
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class MLP(Sequential):
    """Linear layers of the given sizes with an activation after each but the last: MLP([64, 256, 256, 10]).

    Parameters are called "layers.0.weight", "layers.0.bias", ...
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str | None = "relu",
        bias: bool = True,
        dtype: Any = xp.float32,
        seed: int = 0,
    ) -> None:
        hooks.refusals().check_sizes(sizes)
        # The last layer gives logits or values, so it has no activation.
        last = len(sizes) - 2
        layers = [
            Linear(n, m, bias, activation if i < last else None, dtype, seed=None)
            for i, (n, m) in enumerate(pairwise(sizes))
        ]
        super().__init__(*layers)
        self.initialize(seed)
