"""Which server holds which weights: a key (a parameter) lives whole on one server; the largest are assigned first.

    sizes   a 8, b 5, c 4, d 3        server 0: a, d (11)        server 1: b, c (9)

A server's keys are views into one flat array, so that a pull is one message and an update one optimizer step.

Proved by: tests/parallel/test_parameter_server.py
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from minidist.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.layout import offsets
from minidist.core.base.trace import track
from minidist.parallel.assignment import assign_keys

Weights = dict[str, Array]


class Rows(NamedTuple):
    """A sparse gradient of a matrix: `values[i]` belongs to row `ids[i]`; all other rows have gradient zero."""

    ids: Array  # (touched,) int64
    values: Array  # (touched, width)


class ServerShard:
    """The keys of one server as one flat array (`flat`), with the keys as views (`weights`).

    push: what compresses gradients of dense keys (`compress_pushes`); without it they travel in one message. wire: the
    elements and the dtype of each of their messages. rows: the dtype in which rows of sparse keys travel.
    """

    def __init__(self, keys: Sequence[str], initial: Weights, sparse: frozenset[str]) -> None:
        self.keys, self.shapes = list(keys), {key: initial[key].shape for key in keys}
        self.start = dict(zip(self.keys, offsets([prod(self.shapes[key]) for key in keys]), strict=False))
        self.dense = [key for key in keys if key not in sparse]
        self.sparse = [key for key in keys if key in sparse]
        # The empty slice gives a server without keys an array of the right dtype.
        nothing = initial[next(iter(initial))].reshape(-1)[:0]
        self.flat = track(xp.concatenate([nothing, *(initial[k].reshape(-1) for k in keys)]), "parameter")
        self.weights = self.views(self.flat)
        self.push: Any = None
        self.wire, self.rows = [(sum(prod(self.shapes[key]) for key in self.dense), self.flat.dtype)], self.flat.dtype

    def views(self, flat: Array) -> Weights:
        """Return the keys' parts of a flat array, in their shapes."""
        return {
            key: flat[self.start[key] : self.start[key] + prod(shape)].reshape(shape)
            for key, shape in self.shapes.items()
        }

    def gradient(self, contributions: Mapping[str, Any]) -> Array:
        """Return a flat gradient of the whole shard; rows that were not pushed are zeros."""
        flat = track(xp.zeros_like(self.flat), "gradient")
        for key, view in self.views(flat).items():
            value = contributions[key]
            # A row that occurs twice gets both values.
            if isinstance(value, Rows):
                xp.scatter_add_rows(view, value.ids, value.values)
            else:
                view[...] = value
        return flat


def make_shards(servers: int, initial: Weights, sparse: frozenset[str] = frozenset()) -> list[ServerShard]:
    """Return the shard of each server, with the initial weights. Every rank makes the same ones."""
    names = list(initial)
    held = assign_keys([initial[name].size for name in names], servers)
    return [ServerShard([names[key] for key in keys], initial, sparse) for keys in held]


def compress_pushes(shards: Sequence[ServerShard], push: Any, comm: Any) -> None:
    """Let gradients travel as `push` has it, a `PushCompression`, to all servers that have dense keys."""
    for index, shard in enumerate(shards):
        if shard.dense:
            shard.push = push.make(index, shard, comm)
            shard.wire, shard.rows = shard.push.wire, shard.push.rows


def joined(names: Iterable[str], parts: Sequence[Weights]) -> Weights:
    """Return the keys of all servers in the order of `names`."""
    everything = {key: value for part in parts for key, value in part.items()}
    return {key: everything[key] for key in names}
