"""The reference of compressed gradients (`--compression`): what every replica would send, computed on one device.

Compression changes the gradients, and what one replica holds back (error feedback) another has sent. So one device
equals such a job by keeping a residual for each replica, and by compressing each replica's gradient as that rank would:

    replica 0    gradient + residual 0  ──▶  sent 0  ──┐
    replica 1    gradient + residual 1  ──▶  sent 1  ──┴─▶  added in rank order  ──▶  one update

It is written from the formulas of the compressors, over arrays, without their classes and without a message. A
cast and PowerSGD add on the way around a ring, so `ring_sum` adds each chunk in the ring's order. Gradients of 16 bits
are compressed in float32.

Proved by: tests/techniques/test_compression.py
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, prod

import numpy as np

from minidist.base import arrays as xp
from minidist.base.coordinates import Key, normal, uniform
from minidist.base.half import named_dtype
from minidist.core.autograd import Parameter
from minidist.core.base.arrays import is_half
from minidist.core.base.layout import chunk_sizes, cut, offsets
from minidist.techniques.bucket import ReplicaBucket
from minidist.techniques.compression.by_name import check_compression
from minidist.techniques.compression.elementwise import dequantize, quantize
from minidist.techniques.compression.power_sgd import orthonormal

Arrays = list[np.ndarray]


class CompressionReplay:
    """Adds the gradients of a job's replicas as if each had sent its own compressed. It keeps all their residuals.

    dtype: of the gradients. first: the number of the first replica.
    """

    def __init__(self, compression: str, seed: int, dtype: np.dtype, first: int = 0) -> None:
        self.method, self.number = check_compression(compression)
        self.seed, self.dtype, self.first = seed, dtype, first
        self.residuals: dict[tuple[int, int], Arrays] = {}  # bucket -> what each replica has not sent yet
        self.queries: dict[str, np.ndarray] = {}  # of PowerSGD, by parameter

    def sum(self, bucket: ReplicaBucket) -> np.ndarray:
        """Return the sum of the compressed gradients of all replicas; keep each replica's residual."""
        gradients = bucket.gradients
        wide = np.dtype(np.float32) if is_half(self.dtype) else self.dtype
        if self.method in ("fp16", "bf16"):
            narrow = named_dtype("bfloat16" if self.method == "bf16" else "float16")
            return ring_sum([gradient.astype(narrow) for gradient in gradients]).astype(self.dtype)
        if self.method == "qsgd":
            sent = [
                self.rounded(gradient.astype(wide), bucket, rank) for rank, gradient in enumerate(gradients, self.first)
            ]
            return self.added(sent)

        # With error feedback: what is left over joins the next gradient.
        place = bucket.group, bucket.index
        residuals = self.residuals.get(place, [xp.zeros(1, wide, gradient) for gradient in gradients])
        corrected = [gradient.astype(wide) + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        if self.method == "powersgd":
            total, self.residuals[place] = self.factored(bucket.parameters, corrected)
            return total.astype(self.dtype)
        sent = [self.largest(x) if self.method == "topk" else signs(x) for x in corrected]
        self.residuals[place] = [x - what for x, what in zip(corrected, sent, strict=True)]
        return self.added(sent)

    def added(self, parts: Arrays) -> np.ndarray:
        """Return the sum in rank order."""
        return sum(parts, xp.zeros_like(parts[0])).astype(self.dtype)

    def rounded(self, x: np.ndarray, bucket: ReplicaBucket, rank: int) -> np.ndarray:
        """Return what QSGD sends: x at random levels, with numbers of this replica's own."""
        levels = int(self.number or 0)
        draws = uniform(Key(self.seed, "qsgd", bucket.reduction, f"bucket {bucket.index}", rank), 0, x.size)
        level, norm = quantize(x, levels, xp.to_device(draws))
        return dequantize(level, norm[0], levels)

    def largest(self, x: np.ndarray) -> np.ndarray:
        """Return what top-k sends: the largest elements, rounded to the dtype of the gradients, and zeros."""
        share = self.number or 0
        kept = xp.argsort(-xp.absolute(x), kind="stable")[: ceil(share * x.size) if share < 1 else int(share)]
        result = xp.zeros_like(x)
        result[kept] = x[kept].astype(self.dtype)
        return result

    def factored(self, bucket: Sequence[Parameter], corrected: Arrays) -> tuple[np.ndarray, Arrays]:
        """Return PowerSGD's sum, and what it leaves of each replica's own gradient."""
        total, residuals = xp.zeros_like(corrected[0]), [xp.zeros_like(x) for x in corrected]
        matrices, vectors = [], []
        # From the last one, as backward gets to them: where a ring cuts them follows from this order.
        places = pairwise(offsets([p.size for p in bucket]))
        for parameter, (start, stop) in reversed(list(zip(bucket, places, strict=True))):
            m, k = parameter.shape[0], prod(parameter.shape[1:])
            r = min(int(self.number or 0), m, k)
            if len(parameter.shape) > 1 and r * (m + k) < m * k:
                matrices.append((parameter.name, slice(start, stop), m, k, r))
            else:
                vectors.append(slice(start, stop))

        # Vectors travel whole, all matrices' P in one message and all Q in another: the chunks of the ring go by those.
        if vectors:
            whole = ring_sum([xp.concatenate([x[at] for at in vectors]) for x in corrected])
            for at, values in zip(vectors, cut(whole, [at.stop - at.start for at in vectors]), strict=True):
                total[at] = values
        if matrices:
            self._factor(matrices, corrected, total, residuals)
        return total, residuals

    def _factor(
        self, matrices: list[tuple[str, slice, int, int, int]], corrected: Arrays, total: np.ndarray, residuals: Arrays
    ) -> None:
        """Fill in the sum of the matrices, and what is left of them. matrices: name, place, rows, columns and rank."""
        for name, _, _, k, r in matrices:
            if name not in self.queries:
                draws = normal(Key(self.seed, "powersgd", name=name), (k, r))
                self.queries[name] = xp.to_device(draws.astype(total.dtype))
        queries = [self.queries[name] for name, *_ in matrices]
        of_rank = [[x[at].reshape(m, k) for _, at, m, k, _ in matrices] for x in corrected]
        left = ring_sums([[a @ q for a, q in zip(own, queries, strict=True)] for own in of_rank])
        left = [orthonormal(p) for p in left]
        mine = [[a.T @ p for a, p in zip(own, left, strict=True)] for own in of_rank]
        for i, (p, q) in enumerate(zip(left, ring_sums(mine), strict=True)):
            name, at, *_ = matrices[i]
            total[at], self.queries[name] = (p @ q.T).reshape(-1), q
            for residual, own, q_mine in zip(residuals, of_rank, mine, strict=True):
                residual[at] = (own[i] - p @ q_mine[i].T).reshape(-1)


def signs(x: np.ndarray) -> np.ndarray:
    """Return what SignSGD sends: one magnitude with the sign of each element."""
    scale = xp.absolute(x).sum() / x.dtype.type(x.size)
    result: np.ndarray = xp.where(x >= 0, scale, -scale)
    return result


def ring_sum(parts: Arrays) -> np.ndarray:
    """Return the sum as the ring adds it: chunk j begins at rank j + 1 and ends at rank j."""
    total, bounds = parts[0].copy(), offsets(chunk_sizes(parts[0].size, len(parts)))
    for j, (start, stop) in enumerate(pairwise(bounds)):
        order = [(j + 1 + i) % len(parts) for i in range(len(parts))]
        chunk = parts[order[0]][start:stop]
        for rank in order[1:]:
            chunk = chunk + parts[rank][start:stop]
        total[start:stop] = chunk
    return total


def ring_sums(of_rank: Sequence[Arrays]) -> Arrays:
    """Return the sums over the ranks of several arrays that travel as one."""
    total = ring_sum([xp.concatenate([array.reshape(-1) for array in arrays]) for arrays in of_rank])
    pieces = cut(total, [array.size for array in of_rank[0]])
    return [piece.reshape(array.shape) for piece, array in zip(pieces, of_rank[0], strict=True)]
