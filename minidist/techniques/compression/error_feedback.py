"""What all compressors of gradients share: error feedback, and the state that a checkpoint keeps.

A compressor's state is of two kinds. The residual belongs to a rank: it is what *this* rank has not sent yet. The rest
(PowerSGD's queries, QSGD's count of calls) is equal on all ranks. Both can be saved independent of the buckets, so that
a job may resume with others.

Proved by: tests/techniques/test_compressors.py, tests/techniques/test_compression.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.collectives.closed_forms import volume
from minidist.core.base.arrays import is_half
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import cut
from minidist.core.base.trace import track
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.data_parallel import Bucket
from minidist.parallel.compressor import Compressor


class Part:
    """Some parameters of a bucket, as a bucket: those that the same ranks hold.

    places: the slices of the bucket where its parameters are. flat, slice: the flat parameters of the bucket, and its
    place in them. size: the number of elements.
    """

    def __init__(self, index: Any, bucket: Bucket, parameters: Sequence[Any], places: Sequence[slice]) -> None:
        self.index, self.bucket, self.parameters, self.places = index, bucket, parameters, places
        self.flat, self.slice = bucket.flat, bucket.slice
        self.sizes = [place.stop - place.start for place in places]
        self.size = sum(self.sizes)

    @property
    def buffer(self) -> np.ndarray:
        """The gradients, 1-D."""
        return self.of(self.bucket.buffer)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the elements of this part from an array of the whole bucket."""
        pieces = [array[place] for place in self.places]
        return pieces[0] if len(pieces) == 1 else xp.concatenate(pieces)

    def put(self, array: np.ndarray, values: np.ndarray) -> None:
        """Put the values of this part into an array of the whole bucket."""
        for place, piece in zip(self.places, cut(values, self.sizes), strict=True):
            array[place] = piece


class GradientCompressor(Compressor):
    """The base of all compressors of this technique: a `Compressor` with state.

    What a rank sends of its gradient are the arrays of `encode`, and what they stand for is `decode` of them.
    """

    by_bucket = False  # does what it sends of an element depend on the other elements of the bucket?
    error_feedback = False  # does it keep a residual?
    ring = False  # are the arrays summed in ring all-reduces? otherwise every rank gets those of all others

    def __init__(self, comm: Comm, op: str = "mean") -> None:
        super().__init__(comm, op)
        self.residuals: dict[Any, np.ndarray] = {}  # index of a part -> what this rank has not sent yet

    def parts(self, bucket: Bucket) -> list[Part]:
        """Return what is compressed together: the bucket, or its parameters by who holds them.

        Tensor-parallel ranks hold the same norms next to different shards. If the shards decided what is sent of the
        norms' gradients, each rank would send something else, and the copies of the norms would drift apart.
        """
        held: dict[Any, list[Any]] = {}
        for parameter in bucket.parameters if self.by_bucket else ():
            layout = getattr(parameter, "layout", None)
            held.setdefault(layout and (layout.axes, layout.copies), []).append(parameter)
        if len(held) < 2:
            return [Part(bucket.index, bucket, bucket.parameters, [slice(0, bucket.size)])]
        places = {p: bucket.flat.slice_of(p) for p in bucket.parameters}
        start = bucket.slice.start
        return [
            Part(
                (bucket.index, by), bucket, mine, [slice(places[p].start - start, places[p].stop - start) for p in mine]
            )
            for by, mine in held.items()
        ]

    def corrected(self, bucket: Bucket | Part) -> np.ndarray:
        """Return the gradient plus the residual of earlier steps, as a new array; float32 for 16-bit gradients."""
        residual = self.residuals.get(bucket.index)
        gradient: np.ndarray = bucket.buffer.astype(wide(bucket.buffer.dtype))
        return gradient if residual is None else gradient + residual

    def wire(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return the elements and the dtype of each array of `encode`."""
        raise NotImplementedError

    def encode(self, bucket: Any) -> list[np.ndarray]:
        """Return this rank's gradient compressed, as 1-D arrays, and keep its residual."""
        raise NotImplementedError

    def decode(self, bucket: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the gradient that such arrays stand for."""
        raise NotImplementedError

    def sent_bytes(self, bucket: Bucket, rank: int) -> int:
        n, total = self.comm.size, 0
        for size, dtype in (array for part in self.parts(bucket) for array in self.wire(part)):
            elements = volume("all_reduce", "ring", size, n, rank).elements if self.ring else (n - 1) * size
            total += elements * np.dtype(dtype).itemsize
        return total

    def reduce(self, comm: PointToPoint, bucket: Bucket) -> None:
        """Do a ring all-gather of each array, and add what they stand for in rank order: the same bits on all ranks."""
        total = xp.zeros(bucket.size, wide(bucket.flat.dtype), bucket.buffer)
        for part in self.parts(bucket):
            gathered = [all_gather(comm, array).reshape(comm.size, array.size) for array in self.encode(part)]
            # Every rank adds in rank order.
            of_part = xp.zeros(part.size, total.dtype, total)
            for rank in range(comm.size):
                of_part += self.decode(part, [array[rank] for array in gathered])
            part.put(total, of_part)
        self.finish(bucket, total)

    def keep(self, bucket: Bucket | Part, residual: np.ndarray) -> None:
        """Keep what was not sent for the next step; it counts as memory for communication."""
        self.residuals[bucket.index] = track(residual, "communication")

    # --- in a checkpoint ---

    def residual(self, buckets: Sequence[Bucket]) -> np.ndarray:
        """Return this rank's residual of all buckets of a flat gradient, 1-D, in flat order; zeros where there is none.

        On another number of ranks its sum over the ranks must be kept (with op "sum"; with "mean" a residual is also
        divided by the number of ranks, and must be scaled by new ranks / old ranks).
        """
        # In flat order, which does not depend on how the gradient is cut into buckets.
        flat = buckets[0].flat
        result = xp.zeros(flat.numel, wide(flat.dtype), next(iter(self.residuals.values()), None))
        for bucket in buckets:
            for part in self.parts(bucket):
                if part.index in self.residuals:
                    part.put(result[bucket.slice], self.residuals[part.index])
        return result

    def load_residual(self, buckets: Sequence[Bucket], residual: np.ndarray) -> None:
        """Load what `residual` returned, for any buckets of the same flat gradient."""
        flat = buckets[0].flat
        if residual.shape != (flat.numel,) or residual.dtype != wide(flat.dtype):
            raise UsageError(
                f"rank {self.comm.rank}: a residual of {residual.shape} {residual.dtype} for a flat gradient of "
                f"({flat.numel},) {flat.dtype}; resume with the model and --compression that it was saved with"
            )
        for bucket in buckets:
            for part in self.parts(bucket):
                self.keep(part, xp.on_device_of(bucket.flat.data, part.of(residual[bucket.slice]).copy()))

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return what else the next step depends on: arrays by name, equal on all ranks."""
        return {}

    def load_shared_state(self, state: dict[str, np.ndarray]) -> None:
        """Load what `shared_state` returned."""


def wide(dtype: Any) -> Any:
    """Return the dtype in which gradients of `dtype` are compressed: float32 for 16-bit ones.

    A residual in 16 bits would lose what is small next to the gradient, which is what it is there to keep.
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype
