"""What all compressors share: the hook, error feedback, and the state that a checkpoint keeps.

A compressor's state is of two kinds. The residual belongs to a rank: it is what *this* rank has not sent yet. What else
there is (PowerSGD's queries, QSGD's count of calls) is equal on all ranks. Both are handed out by the names of
parameters, so that a job may go on with other buckets.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.memory import track
from minidist.collectives import volume
from minidist.comm import Comm, PointToPoint, Work
from minidist.parallel.gradients import Bucket


def compress(state: "Compressor", bucket: Bucket) -> Work:
    """The hook: `ddp.register_comm_hook(state, compress)`. Runs in the communicator's lane."""
    call = state.comm.collective(f"compress/{type(state).__name__}")
    return call.run_async(lambda: state.reduce(call, bucket))


class Compressor:
    """What all compressors share. op: "mean" (PyTorch's) or "sum", as in `DistributedDataParallel(reduction=)`."""

    feedback = False  # is there a residual?

    def __init__(self, comm: Comm, op: str = "mean") -> None:
        if op not in ("mean", "sum"):
            raise UsageError(f"rank {comm.rank}: compression with op {op!r}; it must be 'mean' or 'sum'")
        self.comm, self.op = comm, op
        self.residuals: dict[int, np.ndarray] = {}  # bucket index -> what this rank has not sent yet

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Replace the bucket's gradient by the sum (or mean) over all ranks of the compressed ones."""
        raise NotImplementedError

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        """What rank `rank` sends for this bucket, in closed form."""
        raise NotImplementedError

    def corrected(self, bucket: Bucket) -> np.ndarray:
        """The gradient with what earlier steps left behind, a new array."""
        residual = self.residuals.get(bucket.index)
        gradient: np.ndarray = bucket.buffer
        return gradient.copy() if residual is None else gradient + residual

    def keep(self, bucket: Bucket, residual: np.ndarray) -> None:
        """Remember what was not sent; it counts as memory for communication."""
        self.residuals[bucket.index] = track(residual, "communication")

    def finish(self, bucket: Bucket, total: np.ndarray) -> None:
        """Put the sum into the bucket."""
        bucket.buffer[...] = total
        if self.op == "mean":
            bucket.buffer[...] /= bucket.buffer.dtype.type(self.comm.size)

    # in a checkpoint
    # ----------------------------------------------------------------------------------------------------

    def residual(self, buckets: Sequence[Bucket]) -> np.ndarray:
        """This rank's residual of all buckets of a flat gradient, 1-D, in the flat order; zeros where nothing is left.

        Rule on another number of ranks: its sum over the ranks is kept (with op "sum"; with "mean" a residual also
        counts by the number of ranks, and must be scaled by new ranks / old ranks).
        """
        flat = buckets[0].flat
        result = np.zeros(flat.padded_numel, flat.dtype)
        for bucket in buckets:
            if bucket.index in self.residuals:
                result[bucket.slice] = self.residuals[bucket.index]
        return result

    def load_residual(self, buckets: Sequence[Bucket], residual: np.ndarray) -> None:
        """Take a residual that was made by `residual`, of any buckets of the same flat gradient."""
        flat = buckets[0].flat
        if residual.shape != (flat.padded_numel,) or residual.dtype != flat.dtype:
            raise UsageError(
                f"rank {self.comm.rank}: a residual of {residual.shape} {residual.dtype} for a flat gradient of "
                f"({flat.padded_numel},) {flat.dtype}; resume with the model and --compression that it was saved with"
            )
        for bucket in buckets:
            self.keep(bucket, residual[bucket.slice].copy())

    def shared_state(self) -> dict[str, np.ndarray]:
        """What else the next step depends on: arrays by name, equal on all ranks."""
        return {}

    def load_shared_state(self, state: dict[str, np.ndarray]) -> None:
        """Take what `shared_state` gave."""


def ring_bytes(elements: int, ranks: int, rank: int, itemsize: int) -> int:
    """Bytes that a rank sends in a ring all-reduce."""
    return volume("all_reduce", "ring", elements, ranks, rank).elements * itemsize


def gather_bytes(nbytes: Any, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-gather, every rank's part being of the same size."""
    return (ranks - 1) * int(nbytes)
