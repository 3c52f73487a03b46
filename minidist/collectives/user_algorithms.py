"""Algorithms of a user, registered by a program or read from a file. Their results are checked.

    @algorithm("all_reduce", "my_name")
    def star(comm, array, op): ...

The formulas may be left out. `algorithm="my_name"` in a call then runs the function; `algorithm="FILE.py:FUNCTION"`
takes a function from a file. `minidist check-collective` compares its results with NumPy's.

Proved by: tests/collectives/test_own_algorithms.py
"""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, reason
from minidist.base.user_file import load_function
from minidist.collectives.algorithms import ALGORITHMS, PARAMETERS
from minidist.comm.has_run import has_run
from minidist.core.collectives.calls import Algorithm, Function

at_registration: list[Callable[[], None]] = []  # forgets what was chosen without the new algorithm


def algorithm(
    operation: str,
    name: str,
    *,
    sends: Callable[..., tuple[int, int]] | None = None,
    seconds: Callable[..., float] | None = None,
) -> Callable[[Function], Function]:
    """Register a program's function as `operation`'s algorithm `name`. See `Algorithm` for the two formulas.

    UsageError for an unknown operation, a name that is taken or no word, and a function that cannot be called.
    """
    if operation not in ALGORITHMS:
        raise UsageError(
            f"@algorithm: no collective {quoted(operation)}{nearest(str(operation), ALGORITHMS)}; one of "
            f"{', '.join(ALGORITHMS)}"
        )
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name) or name == "auto":
        raise UsageError(f"@algorithm: the name {quoted(name)}; it must be a word, and not 'auto'")

    def register(function: Function) -> Function:
        _check_users(operation, name, function)
        run = _with_result_checked(operation, name, function)
        ALGORITHMS[operation].add(name, Algorithm(name, run, sends, seconds, is_users=True))
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
        named = dict(zip(PARAMETERS[operation], (array, *arguments), strict=True))
        target = named.get("out", array if operation in ("all_reduce", "broadcast") else None)
        if target is not None:
            if result is not None and result is not target and getattr(result, "base", None) is not target:
                where = "out" if target is not array else "the array that it is given"
                raise UsageError(
                    f"rank {comm.rank}: {operation}/{name} returned another array than {where}; write the result into "
                    f"{where}, and return that or None"
                )
            return target

        # Operations that return a new array: on every rank, or on the root alone.
        if named.get("root", comm.rank) != comm.rank:
            return None
        size = {"reduce": array.size, "gather": sum(named.get("sizes", ()))}.get(
            operation, sum(named.get("receive_sizes", ()))
        )
        if getattr(result, "size", None) != size or result.dtype != array.dtype:
            what = "nothing" if result is None else f"a value of type {type(result).__name__}"
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
    function = load_function(source)
    found = [
        (kind, entry)
        for kind, entries in ALGORITHMS.items()
        for entry in entries.values()
        if inspect.unwrap(entry.run) is function and operation in (None, kind)
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
