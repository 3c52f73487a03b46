"""Compressors that see a bucket as a row of numbers, not as matrices: Cast, TopK, Sign and QSGD.

    Cast   gradients are sent, and added, as float16 or bfloat16, with half the bytes and fewer digits
    TopK   few elements carry most of a gradient, so those are sent now, and the rest when it has grown
    Sign   one bit per element, its sign, and one magnitude for the whole bucket
    QSGD   random rounding to a few levels: each element is inexact but unbiased, so no residual is needed

Sources: Lin et al., Deep gradient compression, ICLR 2018; Karimireddy et al., Error feedback fixes SignSGD, ICML 2019;
Alistarh et al., QSGD, NeurIPS 2017.
Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.coordinates import Key, uniform
from minidist.base.errors import UsageError, quoted
from minidist.base.half import named_dtype
from minidist.base.limits import check_number, check_whole
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.data_parallel import Bucket
from minidist.techniques.compression.error_feedback import GradientCompressor, wide

MAX_LEVELS = 127  # of QSGD: a signed byte


class Cast(GradientCompressor):
    """Sends and adds gradients in 2 bytes per element: half of float32's volume. dtype: "float16" or "bfloat16".

    The mean is taken before the sum, so that float16 overflows no earlier than the gradients themselves.
    """

    ring = True
    settings = ("op", "dtype")

    def __init__(self, comm: Comm, dtype: str = "bfloat16", op: str = "mean") -> None:
        super().__init__(comm, op)
        if dtype not in ("float16", "bfloat16"):
            raise UsageError(f"rank {comm.rank}: a cast to {quoted(dtype)}; use float16 or bfloat16")
        self.dtype = named_dtype(dtype)

    def wire(self, bucket: Bucket) -> list[tuple[int, Any]]:
        """Return 2 B per element."""
        return [(bucket.size, self.dtype)]

    def encode(self, bucket: Bucket) -> list[np.ndarray]:
        """Return the gradient, or its part of the mean, cast."""
        # The mean comes before the sum, so that float16 does not overflow in the sum.
        gradient = bucket.buffer / bucket.buffer.dtype.type(self.comm.size if self.op == "mean" else 1)
        return [gradient.astype(self.dtype)]

    def decode(self, bucket: Bucket, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the numbers in the dtype of the gradient."""
        return parts[0].astype(bucket.flat.dtype)

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do a ring all-reduce of 2 B per element."""
        (gradient,) = self.encode(bucket)
        bucket.buffer[...] = all_reduce(comm, gradient)


class TopK(GradientCompressor):
    """Sends only the elements of largest magnitude of each bucket; of equal ones, the first.

    NaN counts as infinite, so that all ranks see it.

    k: how many (of a bucket that has as many), or, below 1, which share of each bucket, rounded up.
    """

    by_bucket = error_feedback = True
    settings = ("op", "k")

    def __init__(self, comm: Comm, k: float, op: str = "mean") -> None:
        super().__init__(comm, op)
        check_number(f"rank {comm.rank}: top-k: k", k, above=0)
        if k > 1 and k != int(k):
            raise UsageError(
                f"rank {comm.rank}: top-k with k = {k:g}; at least 1 element must travel, or a share between 0 and 1"
            )
        self.k = k

    def kept(self, bucket: Any) -> int:
        """Return how many elements of this bucket travel."""
        size = bucket.size
        if self.k > size:
            raise UsageError(
                f"rank {self.comm.rank}: top-k with k = {self.k:.0f} > {size}, the size of bucket {bucket.index}; lower"
                " k, or raise bucket_cap_mb; with a parameter server use fewer servers"
            )
        return ceil(self.k * size) if self.k < 1 else int(self.k)

    def wire(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return k indices of 4 B and k values."""
        return [(self.kept(bucket), np.int32), (self.kept(bucket), bucket.flat.dtype)]

    def encode(self, bucket: Any) -> list[np.ndarray]:
        """Return the indices of the largest elements, and these."""
        x, k = self.corrected(bucket), self.kept(bucket)
        magnitude = xp.absolute(x)

        # NaN would sort last and never be sent.
        magnitude[xp.isnan(magnitude)] = xp.inf

        # A stable sort, so that of equal magnitudes the first are sent, the same on every run.
        largest = xp.argsort(-magnitude, kind="stable")[:k].astype(np.int32)
        values = x[largest].astype(bucket.buffer.dtype)

        # The residual is x without what is sent: of 16-bit gradients the rounding stays, too.
        x[largest] = 0 if values.dtype == x.dtype else x[largest] - values.astype(x.dtype)
        self.keep(bucket, x)
        return [largest, values]

    def decode(self, bucket: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values at their places, and zeros."""
        largest, values = parts
        result = xp.zeros(bucket.size, wide(bucket.flat.dtype), values)
        result[largest] = values.astype(result.dtype)
        return result


class Sign(GradientCompressor):
    """Sends one bit per element and one number per bucket, the mean magnitude. Zero counts as positive."""

    by_bucket = error_feedback = True

    def wire(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return a value, and d/8 B."""
        return [(1, wide(bucket.flat.dtype)), (-(-bucket.size // 8), np.uint8)]

    def encode(self, bucket: Any) -> list[np.ndarray]:
        """Return the mean magnitude, (1,), so that the sum of |x| is kept, and eight signs in each byte."""
        x = self.corrected(bucket)
        scale = xp.absolute(x).sum(keepdims=True) / x.dtype.type(x.size)
        signs = xp.packbits(x >= 0)
        self.keep(bucket, x - signed(signs, scale, x.size))
        return [scale, signs]

    def decode(self, bucket: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return +scale and -scale."""
        scale, signs = parts
        return signed(signs, scale, bucket.size)


def signed(bits: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    """Return packed signs and a magnitude as an array of +scale and -scale."""
    return xp.where(xp.unpackbits(bits)[:size].view(bool), scale, -scale)


class QSGD(GradientCompressor):
    """Rounds each element at random to one of the levels -s ... s of the bucket's norm; unbiased.

    levels: s, 1 to 127 (one byte per element). E|Q(x) - x|^2 <= min(d/s^2, sqrt(d)/s) |x|^2. The draws depend on the
    seed, the rank, the bucket and the number of the call, so a run can be repeated.
    """

    by_bucket = True
    settings = ("op", "levels")

    def __init__(self, comm: Comm, levels: int = 127, seed: int = 0, op: str = "mean") -> None:
        super().__init__(comm, op)
        if check_whole(f"rank {comm.rank}: QSGD: levels", levels, 1) > MAX_LEVELS:
            raise UsageError(f"rank {comm.rank}: QSGD with {levels} levels; a byte holds 1 to {MAX_LEVELS}")
        self.levels, self.seed = levels, seed
        self.calls: dict[Any, int] = {}
        self.before = 0  # calls in the job that this one goes on from

    def wire(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return a value, and d B."""
        return [(1, wide(bucket.flat.dtype)), (bucket.size, np.int8)]

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return how many times draws were made."""
        return {"calls": np.array(max(self.calls.values(), default=self.before))}

    def load_shared_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue with the draws. Raises UsageError for the state of another compressor."""
        if set(state) != {"calls"} or state["calls"].size != 1:
            raise UsageError(
                f"the compression state is {sorted(state)[:3]}, not that of qsgd; resume with the --compression that it"
                " was saved with"
            )
        self.calls, self.before = {}, int(state["calls"])

    def encode(self, bucket: Any) -> list[np.ndarray]:
        """Return the norm, (1,), and the levels."""
        x, call = self.corrected(bucket), self.calls.get(bucket.index, self.before)
        self.calls[bucket.index] = call + 1

        # Each rank draws other numbers; otherwise the errors of all ranks would add up instead of averaging out.
        key = Key(self.seed, "qsgd", call, f"bucket {bucket.index}", self.comm.rank)
        levels, norm = quantize(x, self.levels, xp.to_device(uniform(key, 0, x.size)))
        return [norm, levels]

    def decode(self, bucket: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of the levels."""
        norm, levels = parts
        return dequantize(levels, norm[0], self.levels)


def quantize(x: np.ndarray, levels: int, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (signed levels as int8, the norm as an array of one element); draws: uniform in [0, 1)."""
    # (1,), an array, so that it can be sent.
    norm = xp.sqrt(xp.square(x, dtype=np.float64).sum(keepdims=True)).astype(x.dtype)
    if not norm[0]:
        return xp.zeros(x.size, np.int8, x), norm

    # |x| / |x|_2 s lies between the levels l and l + 1; it becomes l + 1 with the probability of its distance from l.
    place = xp.minimum(xp.absolute(x).astype(np.float64) / float(norm[0]) * levels, levels)
    level = xp.floor(place)
    level += draws < place - level
    return (xp.sign(x) * level).astype(np.int8), norm


def dequantize(level: np.ndarray, norm: Any, levels: int) -> np.ndarray:
    """Return the values that the levels stand for."""
    values: np.ndarray = level.astype(norm.dtype) * (norm / norm.dtype.type(levels))
    return values
