"""The small layers of a transformer: embedding, layer norm, RMS norm, dropout."""

from typing import Any

from minidist.autograd import Parameter, Tensor, dropout, embedding, layer_norm, rms_norm
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.random import Key, current_coordinates, uniform_rows
from minidist.nn.module import Module


class Embedding(Module):
    """Row look-up: weight (num_embeddings, embedding_dim), indices (...) -> (..., embedding_dim)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: Any = xp.float32, scale: float = 1.0, seed: int | None = 0
    ) -> None:
        self.weight = Parameter(xp.zeros((num_embeddings, embedding_dim), dtype), init=("normal", scale))
        if seed is not None:
            self.initialize(seed)

    def forward(self, indices: Any) -> Tensor:
        """Integers (...) -> rows (..., embedding_dim)."""
        return embedding(indices, self.weight)


class LayerNorm(Module):
    """Normalises the last dim, then scales and shifts: weight and bias (features,)."""

    def __init__(self, features: int, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        self.eps = eps
        self.weight = Parameter(xp.ones(features, dtype), init=("constant", 1.0))
        self.bias = Parameter(xp.zeros(features, dtype), init=("constant", 0.0))
        if seed is not None:
            self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Divides by the root mean square of the last dim, then scales: weight (features,)."""

    def __init__(self, features: int, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        self.eps = eps
        self.weight = Parameter(xp.ones(features, dtype), init=("constant", 1.0))
        if seed is not None:
            self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        return rms_norm(x, self.weight, self.eps)


class Dropout(Module):
    """In training each element is dropped with probability p, the others are divided by 1 - p.

    Which elements depends on (seed, step, the module's qualified name, how often it ran in this batch) and on the
    element's place in the global batch, all from `base.random.batch_coordinates`; so a mask is the same for every
    split of the batch and for a replay. The first dim of x is the sample.
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise UsageError(f"dropout probability {p} is not in [0, 1)")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x (samples, ...) -> the same shape."""
        if not self.training or self.p == 0:
            return x
        return dropout(x, self.keep(x.shape), 1 / (1 - self.p))

    def keep(self, shape: tuple[int, ...]) -> xp.Array:
        """Which elements of the rows of the current batch stay: bools."""
        place = current_coordinates()
        key = Key(place.seed, "dropout", place.step, self.name, place.next_call(self.name))
        draws = uniform_rows(key, place.sample_offset, shape[0], shape[1:])
        return draws >= self.p
