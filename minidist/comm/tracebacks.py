"""What a person reads of an exception that is not ours: its traceback without the lines of this package.

Proved by: tests/comm/test_error_lines.py
"""

import sys
import traceback
from pathlib import Path
from types import TracebackType

from minidist.base.errors import MinidistError, quoted
from minidist.base.process import end_if_nobody_reads
from minidist.base.user_file import without_ours
from minidist.comm.call_site import is_of_user
from minidist.comm.program_lines import shows_all

_PACKAGE = str(Path(__file__).parents[1])
_OF_ARGUMENTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_SHORT = (str, int, float, type(None))  # of values that are shown themselves


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


def note_call(error: BaseException) -> None:
    """Add to an error that arose inside this package which function the program called, and with which values.

    Our own errors say it themselves, and one that arose in a line of the program's is not about our arguments.
    """
    if isinstance(error, MinidistError) or not isinstance(error, _OF_ARGUMENTS):
        return
    called, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if is_of_user(code.co_filename):
            called = None
        elif called is None and code.co_filename.startswith(_PACKAGE):
            called = step.tb_frame
        step = step.tb_next
    # A world only passes on what a program of this package raised.
    if called is None or called.f_code.co_qualname in ("SimWorld.run", "launch"):
        return
    code, values = called.f_code, []
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = called.f_locals.get(name)
        shown = quoted(value) if isinstance(value, _SHORT) else f"a {type(value).__name__}"
        values += [f"{name}={shown}"] * (name not in ("self", "cls"))
    function = code.co_qualname.removesuffix(".__init__")
    note = f"minidist's {function} was called with {', '.join(values)}; help({function}) says what it takes"
    error.__notes__ = [note, *getattr(error, "__notes__", ())]


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
