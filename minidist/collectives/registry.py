"""Which algorithms each collective has, and what each of them sends and how long it takes.

An algorithm says all that in its own file, so that the formula stands beside the loop that it describes:

    @algorithm(
        "all_reduce",
        "my_name",
        sends=lambda sizes, rank: ...,  # (messages, elements) that leave `rank`
        seconds=lambda nbytes, ranks, alpha, beta: ...,  # until the last rank is done
    )
    def all_reduce(comm, array, op): ...

`volume` and `seconds` look a formula up. The tests compare every trace with them, and `algorithm="auto"` chooses by
the seconds, among the algorithms that have a formula.

A program registers algorithms of its own with the same decorator, without formulas if it likes, and then passes
`algorithm="my_name"`; `algorithm="FILE.py:FUNCTION"` takes one from a file. `minidist check-collective` holds it
against NumPy.

Proved by: tests/collectives/test_closed_form.py, tests/collectives/test_papers.py,
tests/collectives/test_own_algorithms.py
"""

import inspect
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from minidist.base.errors import UsageError, nearest, quoted, reason
from minidist.base.layout import chunk_sizes
from minidist.base.registry import Registry, import_modules
from minidist.comm.has_run import has_run

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


def arguments_of(comm: Any, operation: str, elements: int, make: Callable[[int], Any]) -> tuple[Any, ...]:
    """Return what calls.py would pass to an algorithm after the call, for an array of so many elements in all.

    make: returns an array of so many elements.
    """
    # sizes: elements of each rank's chunk. each: of an all_to_all, where all chunks have the same size, rounded up.
    sizes, each = chunk_sizes(elements, comm.size), [-(-elements // comm.size)] * comm.size
    whole, chunk = make(elements), make(sizes[comm.rank])
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "all_gather": lambda: (chunk, sizes, whole),
        "all_reduce": lambda: (whole, "sum"),
        "all_to_all": lambda: (make(sum(each)), each, each),
        "broadcast": lambda: (whole, 0),
        "gather": lambda: (chunk, sizes, 0),
        "reduce": lambda: (whole, 0, "sum"),
        "reduce_scatter": lambda: (whole, sizes, chunk, "sum"),
        "scatter": lambda: (whole if comm.rank == 0 else None, sizes, chunk, 0),
    }
    return arguments[operation]()


class Algorithms(Registry[Algorithm]):
    """The algorithms of one operation by name; FILE.py:FUNCTION is loaded at its first use.

    The files of naive, ring and ordered are imported with the package. Those of the others are when a name is none of
    these, and when somebody looks at all names.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} algorithm")
        self.operation = operation

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (_import_all() and super().__contains__(name))

    def __iter__(self) -> Iterator[str]:
        _import_all()
        return super().__iter__()

    def __len__(self) -> int:
        _import_all()
        return super().__len__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self)

    def values(self) -> ValuesView[Algorithm]:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView[str, Algorithm]:  # type: ignore[override]
        return ItemsView(self)

    def __missing__(self, name: str) -> Algorithm:
        if _import_all():
            return self[name]
        if ".py:" in name and name.lower() not in self.aliases:
            return load_algorithm(name, self.operation)[1]
        return super().__missing__(name)


# Files that register no algorithm, or whose algorithms are imported with the package.
_NOT_LATER = ("auto", "calls", "nodes", "one_event", "operations", "registry", "ring_event", "tuning")
_later = [True]  # whether some files are not imported yet


def _import_all() -> bool:
    """Import the files of all algorithms; return whether some were not imported yet."""
    if not _later:
        return False
    # First of all: the files look at this table, too.
    _later.clear()
    import_modules("minidist.collectives", [str(Path(__file__).parent)], without=_NOT_LATER)
    return True


ALGORITHMS: dict[str, Algorithms] = {operation: Algorithms(operation) for operation in PARAMETERS}
at_registration: list[Callable[[], None]] = []  # forgets what was chosen without the new algorithm


def algorithm(
    operation: str,
    name: str,
    *,
    sends: Callable[..., tuple[int, int]] | None = None,
    seconds: Callable[..., float] | None = None,
) -> Callable[[Function], Function]:
    """Register a function as `operation`'s algorithm `name`. See `Algorithm` for the two formulas."""
    if operation not in ALGORITHMS:
        raise UsageError(
            f"@algorithm: no collective {quoted(operation)}{nearest(str(operation), ALGORITHMS)}; one of "
            f"{', '.join(ALGORITHMS)}"
        )
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name) or name == "auto":
        raise UsageError(f"@algorithm: the name {quoted(name)}; it must be a word, and not 'auto'")

    def register(function: Function) -> Function:
        is_users = getattr(function, "__module__", "").partition(".")[0] != "minidist"
        if is_users:
            _check_users(operation, name, function)
        run = _with_result_checked(operation, name, function) if is_users else function
        ALGORITHMS[operation].add(name, Algorithm(name, run, sends, seconds, function, is_users))
        for forget in at_registration:
            forget()
        return function

    return register


def _check_users(operation: str, name: str, function: Callable[..., Any]) -> None:
    """Refuse a user's function that cannot be called, and one that would replace an algorithm of minidist."""
    there = ALGORITHMS[operation].get(name) if name in ALGORITHMS[operation] else None
    if there is not None and not there.is_users:
        raise UsageError(f"@algorithm: {operation} has an algorithm {quoted(name)} in minidist; choose another name")
    parameters = ("comm", *PARAMETERS[operation])
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise UsageError(
            f"@algorithm: {operation}/{name} cannot be called with ({', '.join(parameters)}): {reason(error)}"
        ) from None
    except ValueError:  # a builtin without a signature
        pass


def _with_result_checked(operation: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function with its result checked: a sum that is written into another array would be lost."""

    @wraps(function)
    def run(comm: Any, array: Any, *arguments: Any) -> Any:
        result = has_run(function(comm, array, *arguments), function, comm.rank)

        # Operations that write into an array of the caller's, and return it.
        target = None
        if operation in ("all_reduce", "broadcast"):
            target = array
        elif operation in ("all_gather", "reduce_scatter", "scatter"):
            target = arguments[1]
        if target is not None:
            if result is not None and result is not target and getattr(result, "base", None) is not target:
                where = "out" if target is not array else "the array that it is given"
                raise UsageError(
                    f"rank {comm.rank}: {operation}/{name} returned another array than {where}; write the result into "
                    f"{where}, and return that or None"
                )
            return target

        # Operations that return a new array: on every rank, or on the root alone.
        named = dict(zip(PARAMETERS[operation], (array, *arguments), strict=True))
        if named.get("root", comm.rank) != comm.rank:
            return None
        size = {"reduce": array.size, "gather": sum(named.get("sizes", ()))}.get(
            operation, sum(named.get("receive_sizes", ()))
        )
        if getattr(result, "size", None) != size or result.dtype != array.dtype:
            what = "nothing" if result is None else f"a {type(result).__name__}"
            raise UsageError(
                f"rank {comm.rank}: {operation}/{name} returned {what}; it must return an array of {size} elements of "
                f"{array.dtype}"
            )
        return result

    return run


def load_algorithm(source: str, operation: str | None = None) -> tuple[str, Algorithm]:
    """Load FILE.py:FUNCTION; return its operation and its entry, which is found by the name `source` from then on.

    A function without `@algorithm` is registered under its own name, for `operation`, or for the operation that it is
    called like.
    """
    # Importing the file registers what is decorated in it.
    from minidist.base.user_file import load_function

    function = load_function(source)
    found = [
        (kind, entry)
        for kind, entries in ALGORITHMS.items()
        for entry in entries.values()
        if entry.function is function and operation in (None, kind)
    ]
    if not found:
        name = source.rpartition(":")[2]
        kind = operation or name
        if kind not in ALGORITHMS:
            raise UsageError(
                f"{source} says no operation; decorate it with @algorithm(OPERATION, NAME) or give --operation, one of "
                f"{', '.join(ALGORITHMS)}"
            )
        algorithm(kind, name if name != kind else f"my_{name}")(function)
        found = [(kind, ALGORITHMS[kind][name if name != kind else f"my_{name}"])]

    kind, entry = found[0]
    ALGORITHMS[kind].aliases[source.lower()] = entry.name
    return kind, entry


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


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: bytes that a link must carry per byte of the array.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    # A pipelined broadcast carries every byte over each link once; an all-reduce is a reduce-scatter and an all-gather.
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
