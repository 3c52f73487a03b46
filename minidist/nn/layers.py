"""The small layers of a transformer: embedding, layer norm, RMS norm, dropout."""

from typing import Any

from minidist.autograd import Parameter, Tensor, dropout, embedding, layer_norm, rms_norm
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.random import BatchCoordinates, Key, current_coordinates, uniform, uniform_rows
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
    split of the batch or of the sequence, and for a replay. x is (samples, ...), a sequence's (samples, T, ...).
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise UsageError(f"dropout probability {p} is not in [0, 1)")
        self.p = p

    @property
    def scale(self) -> float:
        """What the elements that stay are multiplied by."""
        return 1 / (1 - self.p)

    @property
    def active(self) -> bool:
        """Does it drop anything now?"""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """x (samples, ...) -> the same shape."""
        return dropout(x, self.keep(x.shape), self.scale) if self.active else x

    def keep(self, shape: tuple[int, ...]) -> xp.Array:
        """Bools: which elements of the rows of the current batch stay."""
        place = current_coordinates()
        key = Key(place.seed, "dropout", place.step, self.name, place.next_call(self.name))
        if len(shape) < 3:
            return uniform_rows(key, place.sample_offset, shape[0], shape[1:]) >= self.p
        length, positions = self.places(shape[1], place)
        draws = uniform_rows(key, place.sample_offset, shape[0], (length, *shape[2:]))
        return (draws if positions is None else draws[:, positions]) >= self.p

    def places(self, rows: int, place: BatchCoordinates) -> tuple[int, Any]:
        """Of `rows` rows of a text that are here: (length of the whole text, their places in it; None: all)."""
        return (rows, None) if place.positions is None else (place.length, place.positions)


def require_coordinates(positions: Any) -> None:
    """Masks of a part of a text are drawn by the places in `batch_coordinates`: those must be the ones that the model
    got.
    """
    place = current_coordinates()
    if place.positions is None or not xp.array_equal(place.positions, positions):
        raise UsageError(
            "dropout with positions given: the masks of a part of a text are drawn by its places, so say them there"
            " too: batch_coordinates(step, ..., positions=positions, length=tokens of a whole text)"
        )


class AttentionDropout(Dropout):
    """Dropout of attention's weights, which attention itself applies: it asks for a `mask`.

    A weight's place is (global sample, head among all `heads`, query, key). A rank that has some of the heads, or some
    of the queries, draws the numbers that one device draws for them. first: the first head that is here.
    """

    def __init__(self, p: float, heads: int, first: int = 0) -> None:
        super().__init__(p)
        self.heads, self.first = heads, first

    def mask(self, samples: int, heads: int, length: int, first: int = 0) -> xp.Array:
        """Bools (samples, heads, length queries, length keys) of `heads` heads, from the `first` of those here on."""
        place = current_coordinates()
        key = Key(place.seed, "dropout", place.step, self.name, place.next_call(self.name))
        square = length * length
        rows = [
            uniform(key, ((place.sample_offset + n) * self.heads + self.first + first) * square, heads * square)
            >= self.p
            for n in range(samples)
        ]
        return xp.as_array(xp.stack(rows)).reshape(samples, heads, length, length)
