"""Which algorithms each collective has, and what each of them sends and how long it takes.

An algorithm says all that in its own file, so that the formula stands above the loop that it describes:

    @algorithm(
        "all_reduce",
        "my_name",
        sends=lambda sizes, rank: ...,  # (messages, elements) that leave `rank`
        seconds=lambda nbytes, ranks, alpha, beta: ...,  # until the last rank is done
    )
    def all_reduce(comm, array, op): ...

`volume` and `seconds` look a formula up. The tests compare every trace with them, and `algorithm="auto"` chooses by
the seconds, among the algorithms that have a formula.

Programs register their own algorithms with `minidist.collectives.algorithm`: see user_algorithms.py.

Proved by: tests/collectives/test_closed_form.py, tests/collectives/test_papers.py
"""

import inspect
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes
from minidist.core.base.registry import Registry

Function = TypeVar("Function", bound=Callable[..., Any])


class Volume(NamedTuple):
    """What one rank sends in one call; the elements times the item size are bytes."""

    messages: int
    elements: int


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective.

    run: the function, called with the call. sends: (sizes, rank) -> (messages, elements) that leave `rank`, where
    sizes are the elements of each rank's chunk; of an operation with a root both count from the root. seconds:
    (nbytes, ranks, alpha, beta) -> seconds on the alpha-beta clock until the last rank is done, when all ranks begin
    at once and the number of ranks divides the array of `nbytes`. Adding costs nothing there. A formula with a
    parameter `overhead` counts it for every message that waits behind another one at a port; a formula without it says
    that none does. A user's algorithm may have neither. function: what was registered; is_users: by a program, not by
    minidist.
    """

    name: str
    run: Callable[..., Any]
    sends: Callable[..., tuple[int, int]] | None
    seconds: Callable[..., float] | None
    function: Callable[..., Any]
    is_users: bool = False

    def time(self, nbytes: float, ranks: int, alpha: float, beta: float, overhead: float) -> float:
        """Return the seconds of one call; the algorithm must have a formula."""
        assert self.seconds is not None
        if overhead and "overhead" in inspect.signature(self.seconds).parameters:
            return self.seconds(nbytes, ranks, alpha, beta, overhead=overhead)
        return self.seconds(nbytes, ranks, alpha, beta)


# What an algorithm of each operation is called with, after the call.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_gather": ("shard", "sizes", "out"),
    "all_reduce": ("array", "op"),
    "all_to_all": ("array", "send_sizes", "receive_sizes"),
    "broadcast": ("array", "root"),
    "gather": ("shard", "sizes", "root"),
    "reduce": ("array", "root", "op"),
    "reduce_scatter": ("array", "sizes", "out", "op"),
    "scatter": ("array", "sizes", "out", "root"),
}


class Algorithms(Registry[Algorithm]):
    """The algorithms of one operation by name; `hooks` has the places where further ones are looked for.

    The files of the core are imported with the package; further ones when a name is none of theirs, and when somebody
    looks at all names.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} algorithm")
        self.operation = operation

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (_load_more() and super().__contains__(name))

    def __iter__(self) -> Iterator[str]:
        _load_more()
        return super().__iter__()

    def __len__(self) -> int:
        _load_more()
        return super().__len__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self)

    def values(self) -> ValuesView[Algorithm]:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView[str, Algorithm]:  # type: ignore[override]
        return ItemsView(self)

    def __missing__(self, name: str) -> Algorithm:
        if _load_more():
            return self[name]
        for find in hooks.algorithm_sources if name.lower() not in self.aliases else ():
            if (entry := find(self.operation, name)) is not None:
                return cast(Algorithm, entry)
        return super().__missing__(name)


def _load_more() -> bool:
    """Load the algorithms that are registered later; return whether some were not there yet."""
    # First of all: what they load looks at these tables, too.
    later = list(hooks.more_algorithms)
    hooks.more_algorithms.clear()
    for load in later:
        load()
    return bool(later)


ALGORITHMS: dict[str, Algorithms] = {operation: Algorithms(operation) for operation in PARAMETERS}


def algorithm(
    operation: str,
    name: str,
    *,
    sends: Callable[..., tuple[int, int]] | None = None,
    seconds: Callable[..., float] | None = None,
) -> Callable[[Function], Function]:
    """Register a function of this package as `operation`'s algorithm `name`. See `Algorithm` for the two formulas."""

    def register(function: Function) -> Function:
        ALGORITHMS[operation].add(name, Algorithm(name, function, sends, seconds, function))
        return function

    return register


def formulas(operation: str, name: str) -> dict[str, Callable[..., Any]]:
    """Return the two formulas of a registered algorithm, for another one that sends the same."""
    return {kind: formula(operation, name, kind) for kind in ("sends", "seconds")}


def formula(operation: str, name: str, kind: str) -> Callable[..., Any]:
    """Return one formula of a registered algorithm, "sends" or "seconds"; UsageError when it has none."""
    found: Callable[..., Any] | None = getattr(ALGORITHMS[operation][name], kind)
    if found is None:
        raise UsageError(f"{operation}/{name} was registered without `{kind}`; pass it to @algorithm")
    return found


def volume(
    operation: str, algorithm: str, elements: int | Sequence[int], ranks: int, rank: int, root: int = 0, **options: Any
) -> Volume:
    """Return (messages, elements) that leave `rank` in one call.

    elements: of the whole array, cut by `chunk_sizes`; or of each rank's chunk. Of all_to_all: what `rank` sends.
    options: what a formula needs beyond that: `itemsize` (segmented_ring), `rows` (bruck).
    """
    sizes = chunk_sizes(elements, ranks) if isinstance(elements, int) else list(elements)
    # The formulas of these count ranks from the root.
    if operation in ("broadcast", "reduce", "gather", "scatter"):
        sizes, rank = sizes[root:] + sizes[:root], (rank - root) % ranks
    return Volume(*formula(operation, algorithm, "sends")(sizes, rank, **options))


def seconds(
    operation: str, algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0
) -> float:
    """Return the seconds of one call: alpha per message, beta per byte, of alpha the overhead keeps a port busy.

    See `Algorithm.seconds`; UsageError when the algorithm has no formula.
    """
    formula(operation, algorithm, "seconds")
    return ALGORITHMS[operation][algorithm].time(nbytes, ranks, alpha, beta, overhead)
