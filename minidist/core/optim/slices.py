"""What an optimizer works on: named 1-D pieces of parameters, whole or not.

A strategy decides which elements a rank updates: all of them (data parallel), 1/N of them (ZeRO), those of its stage
(pipelines). An update treats every element alone, so any cut gives the same bits. Each slice has `.name`, `.data` and
`.grad`, two arrays of one dtype and equal size; the optimizer reads them anew at each step, because a strategy may bind
other arrays. A `.grad` of None is skipped.

Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks

# Elements: shards begin at multiples, so that the norm of a gradient has the same bits however it is cut.
NORM_BLOCK = 1024


@dataclass(frozen=True)
class FlatSlice:
    """Elements [start, stop) of `source.data` and `source.grad`, the 1-D arrays of a `FlatParameters` or of a shard.

    parameter: whose elements they are; `source.have_grad` says whether it has a gradient now.
    """

    source: Any
    start: int
    stop: int
    name: str
    parameter: Any = None

    @property
    def data(self) -> xp.Array:
        """A view of the data."""
        return self.source.data[self.start : self.stop]  # type: ignore[no-any-return]

    @property
    def grad(self) -> xp.Array | None:
        """A view of the gradient; None when the source has none now."""
        grad = self.source.grad
        return None if grad is None else grad[self.start : self.stop]


def flat_slices(flat: Any, start: int = 0, stop: int | None = None, source: Any = None) -> list[FlatSlice]:
    """Return the parameters of `flat` inside its elements [start, stop), one slice each; frozen ones are left out.

    flat: has `names`, `offsets` (one more) and `parameters` with `requires_grad`, as `FlatParameters` has.
    source: where `.data` and `.grad` are read, when they hold the elements [start, stop) alone (a shard); else `flat`.
    """
    # A shard's arrays begin at 0, where the whole ones have `start`.
    stop = flat.offsets[-1] if stop is None else stop
    shift = 0 if source is None else start
    slices = []
    for parameter, name, (begin, end) in zip(flat.parameters, flat.names, pairwise(flat.offsets), strict=True):
        # The part of this parameter that lies in the range; empty when it lies outside.
        begin, end = max(begin, start), min(end, stop)
        if begin < end and parameter.requires_grad:
            slices.append(FlatSlice(flat if source is None else source, begin - shift, end - shift, name, parameter))
    return slices


def as_slices(parameters: Any) -> Iterator[Any]:
    """Yield the slices in a `FlatParameters`, a slice, a parameter, or an iterable of these, without frozen ones."""
    if hasattr(parameters, "offsets"):
        yield from flat_slices(parameters)
    elif hasattr(parameters, "data") and hasattr(parameters, "grad"):
        if getattr(parameters, "requires_grad", True):
            yield parameters
    elif isinstance(parameters, Iterable) and not isinstance(parameters, str):
        for piece in parameters:
            yield from as_slices(piece)
    else:
        hooks.optimizer_checks().refuse_parameters(parameters)


def have_gradient(source: Any, parameters: Sequence[Any]) -> list[bool]:
    """Return which of the parameters of `source`, the source of a slice, have a gradient; [None] is `source` itself."""
    if hasattr(source, "have_grad") and parameters[0] is not None:
        return source.have_grad(parameters)  # type: ignore[no-any-return]
    # A parameter may lie in a flat array, which knows more of its gradient.
    flat = None if hasattr(source, "have_grad") else getattr(source, "flat", None)
    return [source.grad is not None] * len(parameters) if flat is None else flat.have_grad([source])
