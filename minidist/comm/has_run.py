"""A rank's program must have run when it returns: a generator or a coroutine has not.

One `yield` left in a training loop makes it a generator function, whose call runs none of its lines; so does `async`.

Proved by: tests/comm/test_has_run.py, tests/comm/test_remedies.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_VARARGS
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from minidist.base.errors import AutogradError, UsageError, quoted

# What a call returns that has not run: its type, its name, and the remedy.
NOT_RUN: dict[type, tuple[str, str]] = {
    GeneratorType: ("a generator", "remove `yield` from it, or return a list of the values"),
    CoroutineType: ("a coroutine", "remove `async`, or pass a function that calls asyncio.run with it"),
    AsyncGeneratorType: ("an asynchronous generator", "remove `async` and `yield`"),
    map: ("a map", "return a list of it, which runs it"),
    filter: ("a filter", "return a list of it, which runs it"),
}
LAZY = tuple(NOT_RUN)

any_program = False  # of a rank has returned in this process


class NotRunError(UsageError):
    """A function returned something whose lines have not run yet; the text has the remedy."""


def has_run(result: Any, main: Callable[..., Any], rank: int | None) -> Any:
    """Return what a rank's program returned; NotRunError when it is something whose lines have not run yet.

    rank: None for a function that no rank runs.
    """
    global any_program
    any_program = True
    if isinstance(result, LAZY):
        if isinstance(result, CoroutineType):
            result.close()  # or Python warns that it was never awaited
        what, remedy = next(text for kind, text in NOT_RUN.items() if isinstance(result, kind))
        name = getattr(main, "__name__", "the function")
        where = "" if rank is None else f"rank {rank}: "
        raise NotRunError(f"{where}{name} returned {what}, so none of its lines has run; {remedy}")
    return result


@contextmanager
def with_remedies() -> Iterator[None]:
    """Raise, in place of an exception that leaves the block, the error that says what to write instead."""
    try:
        yield
    except (AttributeError, AutogradError, NotImplementedError, TypeError) as error:
        from minidist.comm.remedies import remedy

        if (better := remedy(error)) is not None:
            raise better from error
        raise


def check_takes_comm(main: Callable[..., Any]) -> None:
    """Raise UsageError for a function without a parameter for the communicator."""
    code = getattr(main, "__code__", None)
    if code is not None and not code.co_argcount and not code.co_flags & CO_VARARGS:
        name = quoted(main.__name__, marks=False)
        raise UsageError(
            f"{name}() has no parameter, and each rank calls it with its communicator: write def {name}(comm)"
        )
