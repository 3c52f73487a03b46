"""Sparse training on several ranks: the same mask on all of them, and gradients of the kept weights alone.

    replicated weights    every rank has the same bits, so every rank finds the same mask: no message
    sharded weights       the threshold depends on all shards: elements are counted (`selection.keep_largest`)

Because masks are equal, a reduction of gradients can leave out the pruned entries, and need not say which ones these
are (top-k compression must): `KeptEntries` sends 2 (n-1)/n of what is kept, ZeRO's reduce-scatter (n-1)/n
(`layouts.scatter_kept`). ZeRO 3 has masks of shards, so its ranks tell each other new ones, a bit for each element
(`layouts.ReduceKept`). Where every element is added in rank order (`algorithm="ordered"`), the sums have the bits
of the whole reduction.

    step t    gradients of the kept ── all-reduce ──▶ step ──▶ weights x mask ──(schedule)──▶ new mask for step t + 1

Source: Zhu and Gupta, "To prune, or not to prune", 2017, arXiv:1710.01878.
Proved by: tests/techniques/test_pruner.py
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minidist.base import arrays as xp
from minidist.collectives.closed_forms import volume
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import track
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, PointToPoint
from minidist.core.nn.layers import Conv1D, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel.data_parallel import Bucket
from minidist.parallel.compressor import Compressor
from minidist.techniques.pruning.schedule import SparsitySchedule, pattern_mask
from minidist.techniques.pruning.selection import keep_largest, magnitude_keys


class Part(NamedTuple):
    """Elements [start, start + values.size) of the flattened parameter `name`: a 1-D view of what this rank holds."""

    name: str
    values: Array
    start: int = 0


@dataclass(frozen=True)
class Matrix:
    """A weight that may be pruned. axis: the dim that the product sums over. itemsize: bytes of an element."""

    shape: tuple[int, ...]
    axis: int
    itemsize: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]


def prunable(model: Module) -> dict[str, Matrix]:
    """Return the weights of the linear layers by name; embeddings, norms and biases are not pruned."""
    result = {}
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if isinstance(layer, (Linear, Conv1D)) or hasattr(layer, "weight_is_in_out"):
            weight, is_in_out = layer.weight, isinstance(layer, Conv1D) or getattr(layer, "weight_is_in_out", False)
            result[weight.name] = Matrix(weight.shape, 0 if is_in_out else 1, weight.dtype.itemsize)
    return result


def check_prunable(model: Module, pattern: tuple[int, int] | None) -> None:
    """Raise UsageError for a model without prunable weights, or with layers that the pattern does not divide."""
    matrices = prunable(model)
    if not matrices:
        raise UsageError(
            f"{type(model).__name__} has no Linear or Conv1D layer to prune; use these for its products, or leave"
            " --sparsity out"
        )
    for name, matrix in matrices.items() if pattern is not None else ():
        n, m = pattern or (0, 1)
        if matrix.shape[matrix.axis] % m:
            raise UsageError(
                f"parameter {name!r} multiplies {matrix.shape[matrix.axis]} inputs, which cannot be cut into groups of"
                f" {m} for the pattern {n}:{m}; use widths that are multiples of {m}"
            )


class Pruner:
    """The masks of weights, on one rank.

    matrices: what may be pruned (`prunable`). schedule: how much of it after how many steps. scope: "layer" prunes each
    matrix to the sparsity, "global" all of them together. pattern: (n, m), in place of a scope; set when the schedule
    begins. comm: the ranks that hold shards of the weights, in rank order; None where every rank has all of them.
    """

    def __init__(
        self,
        matrices: Mapping[str, Matrix],
        schedule: SparsitySchedule,
        scope: str = "layer",
        pattern: tuple[int, int] | None = None,
        comm: Comm | None = None,
    ) -> None:
        self.matrices, self.schedule, self.scope, self.pattern = dict(matrices), schedule, scope, pattern
        self.comm = comm if comm is not None and comm.size > 1 else None
        self.masks: dict[str, Part] = {}  # with bools as values
        self.zeros: dict[str, int] = {}  # how many elements each mask leaves out

    def prune(self, done: int, weights: Sequence[Part]) -> None:
        """End step number `done`: find new masks when the schedule says so, and set what is pruned to zero.

        With `comm` all its ranks call it; they send `selection_bytes` (purpose `pruning`).
        """
        held = {part.name: part for part in weights if part.name in self.matrices}
        if self.matrices and self.schedule.is_due(done):
            found = self._largest(done, held) if self.pattern is None else self._patterns(held)
            masks = [held[name]._replace(values=mask) for name, mask in found.items() if name in held]
            self.load(masks, self._zeros(done))
        self.apply(weights)

    def load(self, masks: Sequence[Part], zeros: Mapping[str, int] | None = None) -> None:
        """Take over masks, such as those of a checkpoint.

        zeros: how many elements each of them leaves out, where that is known; otherwise they are counted.
        """
        self.masks = {mask.name: mask._replace(values=track(mask.values, "optimizer")) for mask in masks}
        if zeros is None:
            zeros = {mask.name: mask.values.size - int(mask.values.sum()) for mask in masks}
        self.zeros = dict(zeros)

    def apply(self, parts: Sequence[Part]) -> None:
        """Set the pruned elements of weights or gradients to zero."""
        for name, values, start in parts:
            if name in self.masks:
                _, mask, first = self.masks[name]
                values[~mask[start - first : start - first + values.size]] = 0

    def kept(self, bucket: Bucket) -> Array:
        """Return which elements of a bucket of whole parameters the masks keep (bool), padding among them."""
        # In flat order; a bucket's parameters come from the end. What lies behind the last one is padding.
        first, kept = bucket.slice.start, xp.full(bucket.buffer.size, True, bool, bucket.buffer)
        for parameter in bucket.parameters:
            if parameter.name in self.masks:
                place = bucket.flat.slice_of(parameter)
                kept[place.start - first : place.stop - first] = self.masks[parameter.name].values
        return kept

    def number_kept(self, bucket: Bucket) -> int:
        """Return how many elements `kept` keeps, padding among them."""
        masked = (p.name for p in bucket.parameters if p.name in self.masks)
        return int(bucket.buffer.size) - sum(self.zeros[name] for name in masked)

    def groups(self) -> list[int]:
        """Return the group of each matrix in which its elements are compared: its own, or one for all."""
        return [0] * len(self.matrices) if self.scope == "global" else list(range(len(self.matrices)))

    def pruned(self, done: int) -> list[int]:
        """Return how many elements of each group (with a pattern of each matrix) are zero after `done` steps."""
        sizes = [matrix.size for matrix in self.matrices.values()]
        if self.scope == "global" and self.pattern is None:
            sizes = [sum(sizes)]
        return [self.schedule.pruned(size, done) for size in sizes]

    def _zeros(self, done: int) -> dict[str, int] | None:
        """Return how many elements of each matrix are pruned, where that does not depend on values, otherwise None.

        It depends on values which of several matrices, or of several shards, has the smallest ones.
        """
        if self.pattern is not None:
            n, m = self.pattern
            return {name: matrix.size // m * (m - n) for name, matrix in self.matrices.items()}
        if self.comm is not None or self.scope == "global":
            return None
        return dict(zip(self.matrices, self.pruned(done), strict=True))

    def _largest(self, done: int, held: Mapping[str, Part]) -> dict[str, Array]:
        keys = []
        for name in self.matrices:
            old = self.masks.get(name)
            # A rank may hold nothing of a matrix. What is pruned has the key 0, so that no later mask keeps it.
            none = xp.zeros(0, np.uint64)
            keys.append(magnitude_keys(held[name].values, old and old.values) if name in held else none)
        groups, itemsize = self.groups(), next(iter(self.matrices.values())).itemsize
        sizes = xp.bincount(groups, [matrix.size for matrix in self.matrices.values()]).astype(int)
        keep = [int(size) - zeros for size, zeros in zip(sizes, self.pruned(done), strict=True)]
        return dict(zip(self.matrices, keep_largest(keys, groups, keep, itemsize, self.comm), strict=True))

    def _patterns(self, held: Mapping[str, Part]) -> dict[str, Array]:
        assert self.pattern is not None
        n, m = self.pattern
        shaped = {name: held[name].values.reshape(matrix.shape) for name, matrix in self.matrices.items()}
        return {name: pattern_mask(w, n, m, self.matrices[name].axis).reshape(-1) for name, w in shaped.items()}


class KeptEntries(Compressor):
    """A communication hook that reduces the entries that the masks keep; the others become zero.

    Before the first mask, and for parameters without one, that is everything.
    """

    def __init__(self, comm: Comm, pruner: Pruner, op: str = "mean", algorithm: str = "ring") -> None:
        super().__init__(comm, op)
        self.pruner, self.algorithm = pruner, algorithm

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        """Return 2 (n-1)/n of what is kept now, for the actual chunk sizes of the all-reduce."""
        kept = self.pruner.number_kept(bucket)
        return volume("all_reduce", self.algorithm, kept, self.comm.size, rank).elements * bucket.buffer.itemsize

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do an all-reduce of the kept entries, one after the other in one array."""
        kept, total = self.pruner.kept(bucket), xp.zeros_like(bucket.buffer)
        # The number is given, because a dry run's mask has no values that could be counted.
        values = xp.empty(self.pruner.number_kept(bucket), bucket.buffer.dtype, bucket.buffer)
        xp.compress(kept, bucket.buffer, out=values)
        xp.place(total, kept, all_reduce(comm, values, algorithm=self.algorithm))
        self.finish(bucket, total)
