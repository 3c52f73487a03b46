"""Watchers of operations: what they are told, and how one is set for a block.

Among them are `MemoryAccount` (the bytes that are alive), `FlopCounter` (floating-point operations and bytes moved,
which `PointToPoint.advance_clock` converts into seconds of a virtual clock) and the watcher of `checkpoint` (what a
segment uses).

Proved by: tests/base/test_memory.py, tests/autograd/test_extending.py
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Token
from typing import Any, Self, TypeVar

from minidist.core.base.trace import track as track
from minidist.core.base.trace import watchers as watchers


class Watcher:
    """What a watcher is told. Every method may be left out. It is a context manager, and watches inside the block.

    operations: the (flops, bytes) that it has counted since they were taken, in order; None: it counts none.
    """

    operations: list[tuple[int, int]] | None = None
    _blocks: tuple[Token[tuple["Watcher", ...]], ...] = ()  # of the `with` blocks that it is in

    def __enter__(self) -> Self:
        self._blocks += (set_watcher(self),)
        return self

    def __exit__(self, *exception: object) -> None:
        watchers.reset(self._blocks[-1])
        self._blocks = self._blocks[:-1]

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[Any]) -> None:
        """Called after operation `name` made the tensor `out` from the tensors `sources`.

        cost, saved: see `autograd.record`.
        """

    def allocated(self, array: Any, purpose: str) -> Any:
        """Called when an array was made that is not an operation's result. purpose: one of `memory.MEMORY_PURPOSES`."""

    def parameter_read(self, parameter: Any) -> None:
        """Called when the array of a parameter is read."""

    def input_gradient(self, gradient: Any, cost: tuple[int, int] | None) -> None:
        """Called when backward has computed the gradient of an operation's input. cost: (flops, bytes), if known."""

    def weight_gradient(self, cost: tuple[int, int] | None) -> None:
        """Called when backward has computed one contribution to a parameter's gradient."""

    def counted(self, kind: str, flops: int, nbytes: int) -> None:
        """Called for an operation of `kind` that is not recorded."""


W = TypeVar("W", bound=Watcher)


def set_watcher(watcher: Watcher) -> Token[tuple[Watcher, ...]]:
    """Let `watcher` watch instead of another one of its class. Returns what `watchers.reset` takes."""
    return watchers.set((*(other for other in watchers.get() if type(other) is not type(watcher)), watcher))


@contextmanager
def watching(watcher: W) -> Iterator[W]:
    """Let `watcher` watch in the block, instead of another one of its class."""
    token = set_watcher(watcher)
    try:
        yield watcher
    finally:
        watchers.reset(token)


def current(kind: type[W]) -> W | None:
    """The watcher of class `kind`, or None."""
    for watcher in watchers.get():
        if type(watcher) is kind:
            return watcher
    return None
