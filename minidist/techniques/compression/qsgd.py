"""QSGD: random rounding to a few levels. Each element is inexact but unbiased, so no residual is needed.

Source: Alistarh et al., QSGD, NeurIPS 2017.
Proved by: tests/techniques/test_compressors.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.coordinates import Key, uniform
from minidist.base.limits import check_whole
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.techniques.compression.error_feedback import GradientCompressor, wide

MAX_LEVELS = 127  # a signed byte


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
