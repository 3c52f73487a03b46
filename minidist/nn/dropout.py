"""Dropout whose masks do not depend on how the work is divided: the same on one device and on any mesh.

    a number for each element = f(seed, step, module's name, call, the element's place in the global batch)

So a rank that has some rows, some tokens or some heads draws what one device draws for them, and a replay draws it
again.

Proved by: tests/nn/test_modules.py
"""

from typing import Any

from minidist.base import arrays as xp
from minidist.base.coordinates import BatchCoordinates, Key, current_coordinates, uniform, uniform_rows
from minidist.base.limits import check_number
from minidist.core.autograd import Tensor
from minidist.core.nn.module import Module
from minidist.nn.ops.dropout import DroppedParts, dropout


class Dropout(Module):
    """In training each element is dropped with probability p, the others are divided by 1 - p.

    Which elements depends on (seed, step, the module's qualified name, how often it ran in this batch) and on the
    element's place in the global batch, all from `base.coordinates.batch_coordinates`; so a mask is the same for every
    split of the batch or of the sequence, and for a replay. x is (samples, ...), a sequence's (samples, T, ...).
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_number("p", p, below=1)

    @property
    def scale(self) -> float:
        """The factor of the elements that stay, 1 / (1 - p)."""
        return 1 / (1 - self.p)

    @property
    def active(self) -> bool:
        """Whether it drops anything now: in training, with p above 0."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """x (samples, ...) -> the same shape."""
        return dropout(x, self.keep(x.shape), self.scale) if self.active else x

    def keep(self, shape: tuple[int, ...]) -> xp.Array:
        """Return bools of `shape`: which elements of the rows of the current batch stay."""
        place = current_coordinates()
        key = Key(place.seed, "dropout", place.step, self.name, place.next_call(self.name))
        # Draws are made per sample of the global batch, so this rank's rows get the numbers of one device.
        if len(shape) < 3:
            return xp.to_device(uniform_rows(key, place.sample_offset, shape[0], shape[1:]) >= self.p)
        # Of a sequence whole texts are drawn, and the tokens that are here are picked.
        length, positions = self.places(shape[1], place)
        draws = uniform_rows(key, place.sample_offset, shape[0], (length, *shape[2:]))
        return xp.to_device((draws if positions is None else draws[:, xp.to_host(positions)]) >= self.p)

    def places(self, rows: int, place: BatchCoordinates) -> tuple[int, Any]:
        """Return (length of the whole text, the places in it of the `rows` rows that are here; None: all of them)."""
        return (rows, None) if place.positions is None else (place.length, place.positions)


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

        # A sample's numbers are those of all its heads, (heads, queries, keys): this rank's begin at its first head.
        square = length * length
        rows = [
            uniform(key, ((place.sample_offset + n) * self.heads + self.first + first) * square, heads * square)
            >= self.p
            for n in range(samples)
        ]
        return xp.to_device(xp.stack(rows)).reshape(samples, heads, length, length)

    def of_queries(self, queries: xp.Array, samples: int, heads: tuple[int, int], length: int) -> DroppedParts:
        """Draw which weights of these queries of a text stay. heads: key-value heads, and the query heads of each."""
        mask = self.mask(samples, heads[0] * heads[1], length)[:, :, queries]
        return DroppedParts(mask.reshape(samples, *heads, *mask.shape[2:]), self.scale)

    def part(self, rank: int, ranks: int) -> "AttentionDropout":
        """Return the dropout of the heads that a rank has, 1/ranks of all: the numbers that one device would draw."""
        part = HeadParallelDropout(self.p, self.heads, rank * (self.heads // ranks))
        part.name, part.training = self.name, self.training
        return part


class HeadParallelDropout(AttentionDropout):
    """The masks of the heads that a rank has."""
