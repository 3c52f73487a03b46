"""What a person reads of an exception that is not ours: its traceback without the lines of this package.

Proved by: tests/comm/test_error_lines.py
"""

import sys
import traceback
from types import TracebackType

from minidist.base.process import end_if_nobody_reads
from minidist.base.user_file import without_ours
from minidist.comm.program_lines import shows_all


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception that is not ours, without the lines of this package unless all are asked."""
    shown = traceback.TracebackException.from_exception(error)
    if shows_all():
        return "".join(shown.format())

    # The exception, and those that led to it.
    parts, hidden = [shown], False
    for part in parts:
        kept = without_ours(part.stack)
        hidden |= kept[-1:] != part.stack[-1:]
        part.stack[:] = kept
        parts += [other for other in (part.__cause__, part.__context__) if other is not None]
    more = "(raised inside minidist; --traceback or MINIDIST_TRACEBACK=1 shows the whole way)\n" if hidden else ""
    return "".join(shown.format()) + more


def print_exception(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    """Print an exception that ends the program."""
    print(traceback_of(error), end="", file=sys.stderr)


class _Hook:
    """Puts Python's own way to print an exception back when the exception that has this attribute is gone."""

    def __del__(self) -> None:
        if sys.excepthook is print_exception:
            sys.excepthook = sys.__excepthook__


def print_at_the_end(error: BaseException) -> None:
    """Let Python print this exception by `print_exception` if nobody catches it, unless the program has another way."""
    if isinstance(error, BrokenPipeError):
        end_if_nobody_reads()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_exception
        error.minidist_hook = _Hook()  # type: ignore[attr-defined]
