"""PowerSGD: a gradient matrix is nearly of low rank, so two thin factors of it are sent.

    [1] P = sum over ranks of M Q, orthonormalized       m x r      Q from the step before: one power iteration per step
    [2] Q = sum over ranks of M^T P                      k x r
    [3] the sum of the M is about P Q^T; residual = M - P (M^T P)^T, of this rank's own M

Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.coordinates import Key, normal
from minidist.base.limits import check_whole
from minidist.core.base.layout import cut
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.data_parallel import Bucket
from minidist.techniques.compression.error_feedback import GradientCompressor, wide

Arrays = list[np.ndarray]
Matrix = tuple[str, slice, int, int, int]  # name, place in the bucket, rows, columns, and columns of a factor


class PowerSGD(GradientCompressor):
    """Sends every matrix of the bucket as P Q^T with `rank` columns; vectors and scalars travel whole.

    A parameter of more dims is the matrix (first dim, all others); one whose factors would be no smaller than itself
    travels whole too, unless `always`. Q starts from the last step's (the warm start). With a rank of at least that of
    the sum it is exact.
    """

    error_feedback = ring = True
    settings = ("op", "rank", "always")

    def __init__(self, comm: Comm, rank: int = 1, seed: int = 0, op: str = "mean", always: bool = False) -> None:
        super().__init__(comm, op)
        check_whole(f"rank {comm.rank}: PowerSGD: rank", rank, 1)
        self.rank, self.seed, self.always = rank, seed, always
        self.queries: dict[str, np.ndarray] = {}  # of each parameter that travels as factors

    def factors(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return (m, k, r) of a parameter that travels as factors, None of one that travels whole."""
        # Vectors and scalars are small; an empty matrix has no factors.
        if len(shape) < 2 or not prod(shape):
            return None
        m, k = shape[0], prod(shape[1:])
        r = min(self.rank, m, k)
        return (m, k, r) if self.always or r * (m + k) < m * k else None

    def split(self, bucket: Bucket) -> tuple[list[slice], list[Matrix]]:
        """Return the places of the bucket's parameters that travel whole, and what travels as factors."""
        whole: list[slice] = []
        matrices: list[Matrix] = []
        for parameter in bucket.parameters:
            place, factors = bucket.flat.slice_of(parameter), self.factors(parameter.shape)
            piece = slice(place.start - bucket.slice.start, place.stop - bucket.slice.start)
            if factors is None:
                whole.append(piece)
            else:
                matrices.append((parameter.name, piece, *factors))
        return whole, matrices

    def wire(self, bucket: Bucket) -> list[tuple[int, Any]]:
        """Return the elements of what travels whole, of all P and of all Q."""
        whole, matrices = self.split(bucket)
        sizes = (
            sum(piece.stop - piece.start for piece in whole),
            sum(m * r for _, _, m, _, r in matrices),
            sum(k * r for _, _, _, k, r in matrices),
        )
        return [(size, wide(bucket.flat.dtype)) for size in sizes]

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return the queries, (k, r) each, which are equal on all ranks."""
        return dict(sorted(self.queries.items()))

    def load_shared_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the queries of the step before."""
        self.queries = {name: xp.to_device(query) for name, query in state.items()}

    def encode(self, bucket: Bucket, add: Callable[[Arrays], Arrays] = lambda arrays: arrays) -> Arrays:
        """Return what travels whole, all P and all Q. add: sums arrays over the ranks; alone they are the sums."""
        x = self.corrected(bucket)
        whole, matrices = self.split(bucket)
        residual = xp.zeros_like(x)

        # Biases and norms' weights are sent as they are, together in one message; they leave no residual.
        vectors = add([x[piece] for piece in whole])
        # The first Q is random, and the same on every rank: the key does not name the rank. A resumed job may have
        # another rank than the one whose queries it was given.
        for name, _, _, k, r in matrices:
            if name not in self.queries or self.queries[name].shape != (k, r):
                draws = normal(Key(self.seed, "powersgd", name=name), (k, r))
                self.queries[name] = xp.to_device(draws.astype(x.dtype))
        own = [x[piece].reshape(m, k) for _, piece, m, k, _ in matrices]
        # [1] P, (m, r) each: summed over the ranks, then orthonormal columns, the same bits on every rank.
        left = add([matrix @ self.queries[name] for matrix, (name, *_) in zip(own, matrices, strict=True)])
        left = [orthonormal(p) for p in left]
        # [2] Q, (k, r) each: the sum is what the next step starts from.
        mine = [matrix.T @ p for matrix, p in zip(own, left, strict=True)]
        right = add(mine)
        # [3] P Q^T is the sum over ranks; the residual is what P (M^T P)^T leaves of this rank's own matrix.
        for (name, piece, *_), matrix, p, q_mine, q in zip(matrices, own, left, mine, right, strict=True):
            residual[piece] = (matrix - p @ q_mine.T).reshape(-1)
            self.queries[name] = q
        self.keep(bucket, residual)
        return [xp.concatenate([x[:0], *(a.reshape(-1) for a in arrays)]) for arrays in (vectors, left, right)]

    def decode(self, bucket: Bucket, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return P Q^T of each matrix, and what has travelled whole."""
        whole, matrices = self.split(bucket)
        vectors, left, right = parts
        result = xp.zeros(bucket.size, vectors.dtype, vectors)
        for piece, part in zip(whole, cut(vectors, [piece.stop - piece.start for piece in whole]), strict=True):
            result[piece] = part
        of_p, of_q = cut(left, [m * r for _, _, m, _, r in matrices]), cut(right, [k * r for _, _, _, k, r in matrices])
        for (_, piece, m, k, r), p, q in zip(matrices, of_p, of_q, strict=True):
            result[piece] = (p.reshape(m, r) @ q.reshape(k, r).T).reshape(-1)
        return result

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do up to three ring all-reduces: what travels whole, then all P (r m values each), then all Q (r k)."""
        self.finish(bucket, self.decode(bucket, self.encode(bucket, partial(summed, comm))))


def summed(comm: PointToPoint, arrays: Arrays) -> Arrays:
    """Return the sums over all ranks of several arrays, sent as one."""
    if not arrays:
        return []
    # One message for all arrays: latency is paid once.
    together = all_reduce(comm, xp.concatenate([array.reshape(-1) for array in arrays]))
    parts = cut(together, [array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """Orthonormalize the columns by Gram-Schmidt, each twice against those before it.

    A column that depends on those before it (up to rounding) becomes zero.
    """
    result = columns.copy()
    for j in range(result.shape[1]):
        # Projected twice: after one pass rounding leaves a part of the earlier columns, when the new one is nearly
        # dependent.
        length = float(result[:, j] @ result[:, j]) ** 0.5
        for _ in range(2):
            result[:, j] -= result[:, :j] @ (result[:, :j].T @ result[:, j])
        # What is left of a dependent column is rounding error, which must not be scaled up to length 1.
        rest = float(result[:, j] @ result[:, j]) ** 0.5
        result[:, j] *= 0 if rest <= 100 * np.finfo(result.dtype).eps * length else 1 / rest
    return result
