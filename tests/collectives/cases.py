"""Every collective with every algorithm as one table: how to call it, and what each rank must get, to the bit.

The expected values come from a few lines of NumPy over all ranks' inputs, added as `associations` declares.
"""

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from minidist import collectives
from minidist.collectives.algorithms import ALGORITHMS
from minidist.core.base.layout import chunk_sizes, offsets
from tests.collectives.associations import association

DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "int64")}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
OPS = ("sum", "avg", "max", "min", "prod")
UFUNCS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
ALL = sorted((operation, name) for operation, names in ALGORITHMS.items() for name in names)


@lru_cache(1000)
def primes(count):
    """The first primes: sums and differences of distinct ones do not cancel by accident."""
    sieve = np.ones(20 * count + 100, bool)
    sieve[:2] = False
    for i in range(2, int(sieve.size**0.5) + 1):
        sieve[i * i :: i] &= ~sieve[i]
    return np.flatnonzero(sieve)[:count]


def contribution(rank, size, dtype):
    """A copy of `values_of`, to be overwritten."""
    return values_of(rank, size, dtype).copy()


@lru_cache(10_000)
def values_of(rank, size, dtype):
    """Return a rank's input: other primes for each rank, with alternating signs; sevenths of them for float dtypes."""
    values = primes((rank + 1) * size + 1)[rank * size : (rank + 1) * size] * (-1) ** np.arange(size)
    return values.astype(dtype) if dtype.kind == "i" else (values / 7).astype(dtype)


@dataclass
class Case:
    """One call of one collective on n ranks. `size` elements a rank, or of the whole where the whole is cut."""

    operation: str
    algorithm: str
    ranks: int
    size: int
    dtype: np.dtype = DTYPES["float64"]
    op: str = "sum"
    root: int = 0
    counts: tuple[int, ...] | None = None
    async_op: bool = False

    @property
    def sizes(self):
        """Chunks of the whole."""
        given = self.counts is not None and self.operation != "all_reduce"  # which cuts as it likes
        return list(self.counts) if given else chunk_sizes(self.size, self.ranks)

    def row(self, rank):
        """all_to_all: elements from `rank` to each rank; a rotation of the chunk sizes, so that all rows differ."""
        return [self.sizes[(rank + 2 * j) % self.ranks] if self.counts else 3 for j in range(self.ranks)]

    def input(self, rank):
        elements = {"gather": self.sizes[rank], "all_gather": self.sizes[rank], "all_to_all": sum(self.row(rank))}.get(
            self.operation, self.size
        )
        return values_of(rank, elements, self.dtype)

    def call(self, comm):
        """What rank `comm.rank` gets; checks on the way that an input that is no output stays as it was."""
        array, rank = self.input(comm.rank).copy(), comm.rank
        before = array.copy()
        options = {"algorithm": self.algorithm, "async_op": self.async_op}
        function = getattr(collectives, self.operation)
        if self.operation in ("all_reduce", "broadcast"):
            arguments = {"op": self.op} if self.operation == "all_reduce" else {"root": self.root}
            result = function(comm, array, **arguments, **options)
            before = None
        elif self.operation == "reduce":
            result = function(comm, array, self.root, self.op, **options)
        elif self.operation == "reduce_scatter":
            result = function(comm, array, self.op, counts=self.counts, **options)
        elif self.operation == "scatter":
            out = np.empty(self.sizes[rank], self.dtype)
            result = function(comm, array if rank == self.root else None, out, self.root, counts=self.counts, **options)
        elif self.operation == "gather":
            result = function(comm, array, self.root, counts=self.sizes, **options)
        elif self.operation == "all_gather":
            result = function(comm, array, counts=self.sizes, **options)
        else:
            counts = {}
            if self.counts is not None:
                receives = [self.row(source)[rank] for source in range(comm.size)]
                counts = {"send_counts": self.row(rank), "receive_counts": receives}
            result = function(comm, array, **counts, **options)
        if self.async_op:
            comm.compute(seconds=1e-6)
            result = result.wait()
        if before is not None:
            assert before.tobytes() == array.tobytes(), "an input was changed"
        return result

    def _combined(self, tree, piece):
        """The reduction of a piece of all ranks' inputs, added as `tree` says."""

        def fold(node):
            if not isinstance(node, tuple):
                return self.input(node)[piece]
            return UFUNCS[self.op](fold(node[0]), fold(node[1]))

        total = fold(tree)
        return (total / self.dtype.type(self.ranks)).astype(self.dtype) if self.op == "avg" else total

    def expected(self, rank):
        """What `rank` must get."""
        n, ranks = self.ranks, range(self.ranks)
        if self.operation == "broadcast":
            return self.input(self.root)
        if self.operation in ("gather", "all_gather"):
            whole = np.concatenate([self.input(r) for r in ranks])
            return whole if self.operation == "all_gather" or rank == self.root else None
        start = offsets(self.sizes)
        pieces = [slice(start[j], start[j + 1]) for j in ranks]
        if self.operation == "scatter":
            return self.input(self.root)[pieces[rank]]
        if self.operation == "all_to_all":
            cut = [offsets(self.row(source)) for source in ranks]
            return np.concatenate([self.input(s)[cut[s][rank] : cut[s][rank + 1]] for s in ranks])
        if self.operation == "reduce":
            tree = association(self.algorithm, n, (self.root + 1) % n, self.root, tree=True)
            return self._combined(tree, slice(None)) if rank == self.root else None
        chunks = [self._combined(association(self.algorithm, n, (j + 1) % n), pieces[j]) for j in ranks]
        return np.concatenate(chunks) if self.operation == "all_reduce" else chunks[rank]

    def check(self, rank, result):
        """Assert that `result` is what `rank` must get, to the bit."""
        expected = self.expected(rank)
        if expected is None:
            assert result is None
        else:
            assert result.dtype == expected.dtype
            assert result.tobytes() == expected.tobytes(), (self, rank, result, expected)
