"""The look-up of rows by number: words and positions become vectors.

Proved by: tests/nn/test_modules.py
"""

from typing import Any

from minidist.core.autograd import Parameter, Tensor, embedding
from minidist.core.base import arrays as xp
from minidist.core.nn.module import Module


class Embedding(Module):
    """Row look-up: weight (num_embeddings, embedding_dim), indices (...) -> (..., embedding_dim)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: Any = xp.float32, scale: float = 1.0, seed: int | None = 0
    ) -> None:
        self.weight = Parameter(xp.zeros((num_embeddings, embedding_dim), dtype), init=("normal", scale))
        self.initialize(seed)

    def forward(self, indices: Any) -> Tensor:
        """Integers (...) -> rows (..., embedding_dim)."""
        return embedding(indices, self.weight)
