"""Whether operations are recorded, who counts their cost, who receives contributions: a rank's state, in ContextVars.

`no_grad()` turns recording off for a block. A `FlopCounter` counts floating-point operations and bytes moved without knowing
for whom: a strategy empties it with `take()` at a marker and hands the list to `comm.compute`, which turns it into
time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Self

grad_enabled: ContextVar[bool] = ContextVar("minidist_grad_enabled", default=True)
is_grad_enabled = grad_enabled.get


@contextmanager
def set_grad_enabled(enabled: bool) -> Iterator[None]:
    """Record operations in the block, or do not."""
    token = grad_enabled.set(enabled)
    try:
        yield
    finally:
        grad_enabled.reset(token)


def no_grad() -> AbstractContextManager[None]:
    """Operations in the block are not recorded: their results need no gradient and keep nothing alive."""
    return set_grad_enabled(False)


def enable_grad() -> AbstractContextManager[None]:
    """Operations in the block are recorded, also inside `no_grad()`."""
    return set_grad_enabled(True)


class FlopCounter:
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
        self._tokens: list = []

    def add(self, kind: str, flops: int, nbytes: int) -> None:
        """Count one operation of `kind`."""
        self.operations.append((flops, nbytes))
        total_flops, total_bytes = self.totals.get(kind, (0, 0))
        self.totals[kind] = (total_flops + flops, total_bytes + nbytes)

    def take(self) -> list[tuple[int, int]]:
        """The (flops, bytes) since the last take, in order of execution; the list starts anew."""
        operations, self.operations = self.operations, []
        return operations

    def __enter__(self) -> Self:
        self._tokens.append(flop_counter.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        flop_counter.reset(self._tokens.pop())


flop_counter: ContextVar[FlopCounter | None] = ContextVar("minidist_flop_counter", default=None)

# When set, weight gradients go to this function, (parameter, array) once for each use site, and not into the gradients.
contribution_recorder: ContextVar[Callable[[Any, Any], None] | None] = ContextVar(
    "minidist_contribution_recorder", default=None
)

# Inside the forward of a recomputed segment: its arguments have no node there, so a node in `record` is from outside.
in_segment: ContextVar[bool] = ContextVar("minidist_in_segment", default=False)

# When set, `Parameter.data` appends the parameter at each read: recomputation asks in this way what a function uses.
parameter_reads: ContextVar[list[Any] | None] = ContextVar("minidist_parameter_reads", default=None)
