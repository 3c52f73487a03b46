"""One rank's shard of a flat unit, and what every strategy that shards needs: slices, the clip norm, whole tensors.

    flat unit   | rank 0 | rank 1 | rank 2 |pad|       equal shards; the padding is at the end and holds zeros

A shard begins at a multiple of `alignment` elements. With 1,024, the block of the gradient norm, no block crosses from
one rank to another, and the norm has the same bits as on one device. An optimizer works on a shard as on whole
parameters.

Proved by: tests/parallel/test_zero.py, tests/parallel/test_fully_shard.py
"""

from collections.abc import Iterable, Sequence
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.watchers import track
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import NORM_BLOCK, FlatSlice, flat_slices


class Shard:
    """Elements [start, stop) of the parameters' flat array, `flat`: the part that rank `comm.rank` updates.

    data: the values, 1-D: a view of the whole flat array, or a separate array while the whole is released (ZeRO-3).
    grad: the gradient summed over ranks, or None before the first one since `zero_grad`.
    """

    def __init__(self, parameters: Iterable[Parameter], comm: Comm, alignment: int = NORM_BLOCK) -> None:
        hooks.check_whole("alignment", alignment, 1)
        self.flat, self.alignment = FlatParameters(parameters, pad_to=comm.size * alignment), alignment
        self.comm, self.size = comm, self.flat.padded_numel // comm.size
        self.start, self.stop = comm.rank * self.size, (comm.rank + 1) * self.size
        self.own: xp.Array | None = None  # the values, when they are not a view of the whole
        self._grad: xp.Array | None = None
        self.filled = False  # does _grad hold sums of this step?
        self.used: set[Parameter] | None = None  # whose gradient some rank has computed; None: all
        self.flat.shard = self

    def detach(self) -> None:
        """Keep the values in a separate array, so that the whole can be released."""
        self.own = track(xp.array(self.flat.data[self.start : self.stop]), "parameter")

    @property
    def dtype(self) -> Any:
        """The dtype of values and summed gradient; the whole unit may have another one."""
        return self.flat.dtype if self.own is None else self.own.dtype

    @property
    def data(self) -> xp.Array:
        """The values of this rank's elements; an update changes them in place."""
        return self.flat.data[self.start : self.stop] if self.own is None else self.own

    @property
    def grad(self) -> xp.Array | None:
        """The summed gradient of this rank's elements; frozen parameters and padding read as zeros."""
        return self._grad if self.filled else None

    def zero_grad(self) -> None:
        """Forget the gradient; the next one overwrites it."""
        self.filled, self.used = False, None

    def have_grad(self, parameters: Sequence[Parameter]) -> list[bool]:
        """Return those of these parameters whose gradient some rank has computed since `zero_grad`."""
        return [self.filled and (self.used is None or parameter in self.used) for parameter in parameters]

    def forget(self, parameter: Parameter) -> None:
        """Forget one parameter's elements of the gradient."""
        if self.filled:
            self.grad_buffer()[self.place(self.flat.slice_of(parameter))] = 0

    def updated(self, by: Any = None) -> None:
        """An optimizer's step changed the values."""
        self.flat.updated(by)

    def place(self, piece: slice) -> slice:
        """Return where elements `piece` of the unit lie in this shard; the slice may be empty."""
        # Both ends are clamped to [self.start, self.stop], then counted from the shard's start.
        start = min(max(piece.start, self.start), self.stop)
        return slice(start - self.start, max(start, min(piece.stop, self.stop)) - self.start)

    def counts(self, piece: slice) -> list[int]:
        """Return how many of the elements `piece` each rank owns: a piece that crosses a boundary has two owners."""
        ranks = range(self.comm.size)
        return [max(0, min(piece.stop, (r + 1) * self.size) - max(piece.start, r * self.size)) for r in ranks]

    def grad_buffer(self) -> xp.Array:
        """Return the array of the shard's gradient; at first it holds zeros."""
        if self._grad is None:
            self._grad = track(xp.zeros(self.size, self.dtype, self.data), "gradient")
        return self._grad

    def destination(self, place: slice = slice(None)) -> xp.Array:
        """Return the array for a sum of these elements: the gradient itself, or a new one where it has earlier sums."""
        out = self.grad_buffer()[place]
        return track(xp.empty_like(out), "communication") if self.filled else out

    def slices(self) -> list[FlatSlice]:
        """Return this rank's trainable elements, one slice per parameter, for an optimizer."""
        # A rank that owns none gets an empty slice: its optimizer steps, and says `updated()`, as on every other rank.
        slices = flat_slices(self.flat, self.start, self.stop, source=self)
        return slices or [FlatSlice(self, 0, 0, p.name, p) for p in self.flat.parameters if p.requires_grad][:1]
