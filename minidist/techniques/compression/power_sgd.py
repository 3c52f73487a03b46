"""PowerSGD: a gradient matrix is nearly of low rank, so two thin factors of it are sent.

    [1] P = sum over ranks of M Q, orthonormalized       m x r      Q from the step before: one power iteration per step
    [2] Q = sum over ranks of M^T P                      k x r
    [3] the sum of the M is about P Q^T; residual = M - P (M^T P)^T, of this rank's own M

Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
Proved by: tests/techniques/test_compressors.py
"""

from itertools import accumulate
from math import prod

import numpy as np

from minidist.base import arrays as xp
from minidist.base.limits import check_whole
from minidist.core.base.random import Key, normal
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.gradients import Bucket
from minidist.techniques.compression.error_feedback import GradientCompressor, ring_bytes, wide


class PowerSGD(GradientCompressor):
    """Sends every matrix of the bucket as P Q^T with `rank` columns; vectors and scalars travel whole.

    A parameter of more dims is the matrix (first dim, all others); one whose factors would be no smaller than itself
    travels whole too, unless `always`. Q starts from the last step's (the warm start). With a rank of at least that of
    the sum it is exact.
    """

    error_feedback = True
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

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        """Return 2 (n-1)/n of what travels whole, of all P and of all Q: three all-reduces of actual chunk sizes."""
        # One all-reduce for what travels whole, one for all P, one for all Q.
        factors = [f for p in bucket.parameters if (f := self.factors(p.shape))]
        whole = sum(p.size for p in bucket.parameters if not self.factors(p.shape))
        parts = (whole, sum(m * r for m, _, r in factors), sum(k * r for _, k, r in factors))
        return sum(ring_bytes(part, self.comm.size, rank, wide(bucket.flat.dtype).itemsize) for part in parts)

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return the queries, (k, r) each, which are equal on all ranks."""
        return dict(self.queries)

    def load_shared_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the queries of the step before."""
        self.queries = {name: xp.to_device(query) for name, query in state.items()}

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do up to three ring all-reduces: what travels whole, then all P (r m values each), then all Q (r k)."""
        # Sort the bucket's parameters into those that travel whole and (name, matrix, place, rank) of the others.
        x = self.corrected(bucket)
        whole, matrices = [], []
        for parameter in bucket.parameters:
            place, factors = bucket.flat.slice_of(parameter), self.factors(parameter.shape)
            piece = slice(place.start - bucket.slice.start, place.stop - bucket.slice.start)
            if factors is None:
                whole.append(piece)
            else:
                matrices.append((parameter.name, x[piece].reshape(factors[:2]), piece, factors[2]))

        # Biases and norms' weights are sent as they are, together in one message; they leave no residual.
        total, residual = xp.zeros_like(x), xp.zeros_like(x)
        if whole:
            for piece, part in zip(whole, summed(comm, [x[piece] for piece in whole]), strict=True):
                total[piece] = part
        if matrices:
            # The first Q is random, and the same on every rank: the key does not name the rank. A resumed job may have
            # another rank than the one whose queries it was given.
            for name, matrix, _, r in matrices:
                if name not in self.queries or self.queries[name].shape != (matrix.shape[1], r):
                    draws = normal(Key(self.seed, "powersgd", name=name), (matrix.shape[1], r))
                    self.queries[name] = xp.to_device(draws.astype(x.dtype))
            # [1] P, (m, r) each: summed over the ranks, then orthonormal columns, the same bits on every rank.
            left = summed(comm, [matrix @ self.queries[name] for name, matrix, _, _ in matrices])
            left = [orthonormal(p) for p in left]
            # [2] Q, (k, r) each: the sum is what the next step starts from.
            mine = [matrix.T @ p for (_, matrix, _, _), p in zip(matrices, left, strict=True)]
            right = summed(comm, mine)
            # [3] P Q^T is the sum over ranks; the residual is what P (M^T P)^T leaves of this rank's own matrix.
            for (name, matrix, piece, _), p, q_mine, q in zip(matrices, left, mine, right, strict=True):
                residual[piece] = (matrix - p @ q_mine.T).reshape(-1)
                total[piece] = (p @ q.T).reshape(-1)
                self.queries[name] = q
        self.keep(bucket, residual)
        self.finish(bucket, total)


def summed(comm: PointToPoint, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the sums over all ranks of several arrays, sent as one."""
    # One message for all arrays: latency is paid once.
    together = all_reduce(comm, xp.concatenate([array.reshape(-1) for array in arrays]))
    at = list(accumulate((array.size for array in arrays), initial=0))
    return [together[start:stop].reshape(a.shape) for a, start, stop in zip(arrays, at, at[1:], strict=False)]


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
