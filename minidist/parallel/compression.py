"""Gradient compression: send less of the gradient, and remember what was not sent.

Each class below is the state of a communication hook of `DistributedDataParallel`; one hook serves them all:

    ddp.register_comm_hook(TopK(comm, k=100), compress)

    gradient ──(+)──▶ corrected ──▶ compressed ──▶ to all ranks ──▶ decompressed and added in rank order ──▶ bucket
              ▲           │              │
              └─ residual ◀── corrected - compressed          error feedback: nothing is lost, it is only late

    class      on the wire, for d elements            compressed gradient
    Cast       2 d B, ring all-reduce                 rounded to float16 or bfloat16; the sums are rounded too
    TopK       k (4 B + a value)                      the k elements of largest magnitude; |C(x)-x|^2 <= (1 - k/d) |x|^2
    Sign       d/8 B + a value                        sign(x) times the mean magnitude, |x|_1 / d
    QSGD       d B + a value                          |x|_2 sign(x) l/s, l rounded up or down at random: unbiased
    PowerSGD   r (m + k) values for an m x k matrix   a product of rank r, by one step of power iteration

Error feedback: sent + residual = gradient + earlier residual, so over the steps everything arrives. QSGD has none because its
errors have mean zero; a cast's are small.

Sources: Lin et al., Deep gradient compression, ICLR 2018; Karimireddy et al., Error feedback fixes SignSGD, ICML 2019;
Alistarh et al., QSGD, NeurIPS 2017; Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
"""

from math import prod
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.random import Key, normal, uniform
from minidist.collectives import all_gather, all_reduce
from minidist.comm import Comm, Work
from minidist.parallel.gradients import Bucket


def compress(state: "Compressor", bucket: Bucket) -> Work:
    """The hook: `ddp.register_comm_hook(state, compress)`. Runs in the communicator's lane."""
    channel = state.comm.collective(f"compress/{type(state).__name__}")
    return channel.post(lambda: state.reduce(channel, bucket))


class Compressor:
    """What all states share. op: "mean" (PyTorch's) or "sum", as in `DistributedDataParallel(reduction=)`."""

    def __init__(self, comm: Comm, op: str = "mean") -> None:
        if op not in ("mean", "sum"):
            raise UsageError(f"rank {comm.rank}: compression with op {op!r}; it must be 'mean' or 'sum'")
        self.comm, self.op = comm, op
        self.residuals: dict[int, np.ndarray] = {}  # bucket index -> what this rank has not sent yet

    def reduce(self, comm: Comm, bucket: Bucket) -> None:
        """Replace the bucket's gradient by the sum (or mean) over all ranks of the compressed ones."""
        raise NotImplementedError

    def corrected(self, bucket: Bucket) -> np.ndarray:
        """The gradient with what earlier steps left behind, a new array."""
        residual = self.residuals.get(bucket.index)
        return bucket.buffer.copy() if residual is None else bucket.buffer + residual

    def finish(self, bucket: Bucket, total: np.ndarray) -> None:
        """Put the sum into the bucket."""
        bucket.buffer[...] = total
        if self.op == "mean":
            bucket.buffer[...] /= bucket.buffer.dtype.type(self.comm.size)


class Cast(Compressor):
    """Gradients travel, and are added, in 2 bytes: half of float32's volume. dtype: "float16" or "bfloat16".

    The mean is taken before the sum, so that float16 overflows no earlier than the gradients themselves.
    """

    def __init__(self, comm: Comm, dtype: str = "bfloat16", op: str = "mean") -> None:
        super().__init__(comm, op)
        if dtype not in ("float16", "bfloat16"):
            raise UsageError(f"rank {comm.rank}: a cast to {dtype!r}; it must be to float16 or bfloat16")
        import ml_dtypes

        self.dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)

    def reduce(self, comm: Comm, bucket: Bucket) -> None:
        """A ring all-reduce of 2 B an element."""
        gradient = bucket.buffer / bucket.buffer.dtype.type(comm.size if self.op == "mean" else 1)
        bucket.buffer[...] = all_reduce(comm, gradient.astype(self.dtype))


class TopK(Compressor):
    """Only the k elements of largest magnitude of each bucket travel (all of a smaller bucket); ties: the first ones."""

    def __init__(self, comm: Comm, k: int, op: str = "mean") -> None:
        super().__init__(comm, op)
        if k < 1:
            raise UsageError(f"rank {comm.rank}: top-k with k = {k}; at least 1 element must travel")
        self.k = k

    def reduce(self, comm: Comm, bucket: Bucket) -> None:
        """Two ring all-gathers: k indices (4 B each) and k values from each rank."""
        x = self.corrected(bucket)
        if self.k > x.size:
            raise UsageError(
                f"rank {comm.rank}: top-k with k = {self.k} > {x.size}, the size of bucket {bucket.index}; lower k, or raise "
                "bucket_cap_mb"
            )
        largest = np.argsort(-np.abs(x), kind="stable")[: self.k].astype(np.int32)
        values = x[largest]
        x[largest] = 0
        self.residuals[bucket.index] = x
        indices, everything = all_gather(comm, largest), all_gather(comm, values)
        total = np.zeros_like(x)
        for rank in range(comm.size):
            mine = slice(rank * self.k, (rank + 1) * self.k)
            total[indices[mine]] += everything[mine]
        self.finish(bucket, total)


class Sign(Compressor):
    """One bit an element and one number a bucket, the mean magnitude. (Zero counts as positive.)"""

    def reduce(self, comm: Comm, bucket: Bucket) -> None:
        """Two ring all-gathers: ceil(d / 8) B of signs and one value from each rank."""
        x = self.corrected(bucket)
        scale = np.abs(x).sum(keepdims=True) / x.dtype.type(x.size)
        signs = np.packbits(x >= 0)
        self.residuals[bucket.index] = x - signed(signs, scale, x.size)
        scales, bits = all_gather(comm, scale), all_gather(comm, signs)
        total = np.zeros_like(x)
        for rank in range(comm.size):
            total += signed(bits[rank * signs.size : (rank + 1) * signs.size], scales[rank : rank + 1], x.size)
        self.finish(bucket, total)


def signed(bits: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    """Packed signs and a magnitude as an array of +scale and -scale."""
    return np.where(np.unpackbits(bits, count=size), scale, -scale)


class QSGD(Compressor):
    """Each element becomes one of the levels -s ... s of the bucket's norm, at random, so that its mean is the element.

    levels: s, 1 to 127 (one byte an element). E|Q(x) - x|^2 <= min(d/s^2, sqrt(d)/s) |x|^2. The draws depend on the seed, the
    rank, the bucket and the number of the call, so a run can be repeated.
    """

    def __init__(self, comm: Comm, levels: int = 127, seed: int = 0, op: str = "mean") -> None:
        super().__init__(comm, op)
        if not 1 <= levels <= 127:
            raise UsageError(f"rank {comm.rank}: QSGD with {levels} levels; a byte holds 1 to 127")
        self.levels, self.seed = levels, seed
        self.calls: dict[int, int] = {}

    def reduce(self, comm: Comm, bucket: Bucket) -> None:
        """Two ring all-gathers: d B of levels and one norm from each rank."""
        x, call = bucket.buffer, self.calls.get(bucket.index, 0)
        self.calls[bucket.index] = call + 1
        key = Key(self.seed, "qsgd", call, f"bucket {bucket.index}", comm.rank)
        levels, norm = quantize(x, self.levels, uniform(key, 0, x.size))
        norms, everything = all_gather(comm, norm), all_gather(comm, levels)
        total = np.zeros_like(x)
        for rank in range(comm.size):
            total += dequantize(everything[rank * x.size : (rank + 1) * x.size], norms[rank], self.levels)
        self.finish(bucket, total)


def quantize(x: np.ndarray, levels: int, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(signed levels as int8, the norm as an array of one element); draws: uniform in [0, 1), one an element."""
    norm = np.sqrt(np.square(x, dtype=np.float64).sum(keepdims=True)).astype(x.dtype)
    if not norm[0]:
        return np.zeros(x.size, np.int8), norm
    place = np.minimum(np.abs(x).astype(np.float64) / float(norm[0]) * levels, levels)
    level = np.floor(place)
    level += draws < place - level
    return (np.sign(x) * level).astype(np.int8), norm


def dequantize(level: np.ndarray, norm: Any, levels: int) -> np.ndarray:
    """The values that the levels stand for."""
    return level.astype(norm.dtype) * (norm / norm.dtype.type(levels))


class PowerSGD(Compressor):
    """Every matrix of the bucket as P Q^T with `rank` columns; vectors and scalars travel whole.

    A parameter of more dims is the matrix (first dim, all others); one whose factors would be no smaller than itself travels
    whole too, unless `always`. Q starts from the last step's (the warm start). With rank >= that of the sum it is exact.
    """

    def __init__(self, comm: Comm, rank: int = 1, seed: int = 0, op: str = "mean", always: bool = False) -> None:
        super().__init__(comm, op)
        if rank < 1:
            raise UsageError(f"rank {comm.rank}: PowerSGD of rank {rank}; it must be at least 1")
        self.rank, self.seed, self.always = rank, seed, always
        self.queries: dict[tuple[int, int], np.ndarray] = {}

    def factors(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """(m, k, r) of a parameter that travels as factors."""
        if len(shape) < 2 or not prod(shape):
            return None
        m, k = shape[0], prod(shape[1:])
        r = min(self.rank, m, k)
        return (m, k, r) if self.always or r * (m + k) < m * k else None

    def reduce(self, comm: Comm, bucket: Bucket) -> None:
        """Up to three ring all-reduces: what travels whole, then all P (r m values each), then all Q (r k values each)."""
        x = self.corrected(bucket)
        base = bucket.slice.start
        pieces = [
            (i, p, slice(bucket.flat.slice_of(p).start - base, bucket.flat.slice_of(p).stop - base))
            for i, p in enumerate(bucket.parameters)
        ]
        whole = [piece for _, p, piece in pieces if not self.factors(p.shape)]
        matrices = [
            (i, x[piece].reshape(m, k), piece, r)
            for i, p, piece in pieces
            if (f := self.factors(p.shape))
            for m, k, r in [f]
        ]
        total, residual = np.zeros_like(x), np.zeros_like(x)
        if whole:
            together = all_reduce(comm, np.concatenate([x[piece] for piece in whole]))
            at = np.cumsum([0, *(piece.stop - piece.start for piece in whole)])
            for piece, start, stop in zip(whole, at, at[1:], strict=False):
                total[piece] = together[start:stop]
        if matrices:
            for i, matrix, _, r in matrices:
                if (bucket.index, i) not in self.queries:
                    key = Key(self.seed, "powersgd", name=f"bucket {bucket.index} parameter {i}")
                    self.queries[bucket.index, i] = normal(key, (matrix.shape[1], r)).astype(x.dtype)
            left = summed(comm, [matrix @ self.queries[bucket.index, i] for i, matrix, _, _ in matrices])
            left = [orthonormal(p) for p in left]
            mine = [matrix.T @ p for (_, matrix, _, _), p in zip(matrices, left, strict=True)]
            right = summed(comm, mine)
            for (i, matrix, piece, _), p, q_mine, q in zip(matrices, left, mine, right, strict=True):
                residual[piece] = (matrix - p @ q_mine.T).reshape(-1)
                total[piece] = (p @ q.T).reshape(-1)
                self.queries[bucket.index, i] = q
        self.residuals[bucket.index] = residual
        self.finish(bucket, total)


def summed(comm: Comm, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The sums over all ranks of several arrays, sent as one."""
    together = all_reduce(comm, np.concatenate([array.reshape(-1) for array in arrays]))
    at = np.cumsum([0, *(array.size for array in arrays)])
    return [together[start:stop].reshape(a.shape) for a, start, stop in zip(arrays, at, at[1:], strict=False)]


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """Gram-Schmidt, each column twice against those before; one that depends on them (up to rounding) becomes zero."""
    result = columns.copy()
    for j in range(result.shape[1]):
        length = np.linalg.norm(result[:, j])
        for _ in range(2):
            result[:, j] -= result[:, :j] @ (result[:, :j].T @ result[:, j])
        rest = np.linalg.norm(result[:, j])
        result[:, j] *= 0 if rest <= 100 * np.finfo(result.dtype).eps * length else 1 / rest
    return result
