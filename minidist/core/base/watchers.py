"""Watchers are told of every recorded operation, so that the tape itself only records.

    record(...)                ──▶  recorded            MemoryAccount: the bytes that stay alive
    Parameter.data             ──▶  parameter_read      FlopCounter:   operations and bytes moved
    a backward pass, per node  ──▶  input_gradient,     checkpoint():  what a segment uses
                                    weight_gradient

The watchers of a rank are a tuple in a ContextVar; without any, which is the default, nothing is called.

`FlopCounter` counts floating-point operations and bytes moved, and does not depend on who reads them:
`PointToPoint.advance_clock` takes the counts with `take()` and converts them into seconds of a virtual clock.

Proved by: tests/base/test_memory.py, tests/autograd/test_extending.py, tests/autograd/test_deferred_and_recorded.py
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Self, TypeVar


class Watcher:
    """What a watcher is told. Every method may be left out."""

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


watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("minidist_watchers", default=())

T = TypeVar("T")
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


def track(array: T, purpose: str) -> T:
    """Tell the watchers of a new array; a `MemoryAccount` counts it under `purpose`. Returns `array`."""
    for watcher in watchers.get():
        watcher.allocated(array, purpose)
    return array


def current(kind: type[W]) -> W | None:
    """The watcher of class `kind`, or None."""
    for watcher in watchers.get():
        if type(watcher) is kind:
            return watcher
    return None


class FlopCounter(Watcher):
    """Counts (flops, bytes) of each operation while it is the current counter.

    Each operation adds one entry in forward, and in backward one for each input gradient and one for each weight
    gradient that it computes. Bytes are those read and written if nothing stays in a cache. `totals` has the sums of
    "forward", "input_gradient" and "weight_gradient" since the counter was made.

        with FlopCounter() as counter:
            loss = model(batch)
            comm.compute(operations=counter.take())
    """

    def __init__(self) -> None:
        self.operations: list[tuple[int, int]] = []
        self.totals: dict[str, tuple[int, int]] = {}
        self._tokens: list[Token[tuple[Watcher, ...]]] = []

    def add(self, kind: str, flops: int, nbytes: int) -> None:
        """Count one operation of `kind`."""
        self.operations.append((flops, nbytes))
        total_flops, total_bytes = self.totals.get(kind, (0, 0))
        self.totals[kind] = (total_flops + flops, total_bytes + nbytes)

    def take(self) -> list[tuple[int, int]]:
        """The (flops, bytes) since the last take, in order of execution; the list starts anew."""
        operations, self.operations = self.operations, []
        return operations

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[Any]) -> None:
        """Count the forward, and note on the node what its vector-Jacobian products will cost."""
        flops, of_vjps = cost() if callable(cost) else (out.size if cost is None else cost, None)
        nbytes = out.data.nbytes
        for source in sources:
            nbytes += source.stored.nbytes
        self.add("forward", flops, nbytes)
        if out.node is not None:
            each = [(flops, nbytes)] * len(sources) if of_vjps is None else of_vjps
            # In the order of the node: inputs, then parameters. A frozen input costs nothing.
            needed = [(source.node, c) for source, c in zip(sources, each, strict=True) if source.node is not None]
            if out.node.weights:
                parameters = {parameter for parameter, _ in out.node.weights}
                needed.sort(key=lambda pair: pair[0] in parameters)
            out.node.costs = [c for _, c in needed]

    def input_gradient(self, gradient: Any, cost: tuple[int, int] | None) -> None:
        """Count it; nothing is known of an operation that was recorded before the counter."""
        self.add("input_gradient", *(cost or (0, 0)))

    def weight_gradient(self, cost: tuple[int, int] | None) -> None:
        """Count it, if the operation was recorded with the counter."""
        if cost is not None:
            self.add("weight_gradient", *cost)

    def __enter__(self) -> Self:
        self._tokens.append(set_watcher(self))
        return self

    def __exit__(self, *exception: object) -> None:
        watchers.reset(self._tokens.pop())


current_flop_counter = partial(current, FlopCounter)  # the counter of the innermost `with FlopCounter()`, or None
