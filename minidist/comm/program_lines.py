"""The line of a person's program in an error's traceback.

`lines_of` is what a person reads of an error of ours: the sentence, and the line of their program that led to it (see
tracebacks.py for other exceptions). All of the traceback comes with `--traceback`, or where MINIDIST_TRACEBACK=1 is
set.

Proved by: tests/comm/test_error_lines.py
"""

import os
import traceback

from minidist.comm.call_site import CallSite, is_of_user
from minidist.comm.errors import BufferReuseError


def line_of_error(error: BaseException) -> CallSite | None:
    """Return the innermost line of the user's program that an error passed; None when it passed none."""
    # An error that was made of another one: the line at which the first one arose says more.
    if error.__cause__ is not None and (first := line_of_error(error.__cause__)) is not None:
        return first
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        filename = code.co_filename
        # The methods that a dataclass generates have the file name of `python -c`.
        generated = filename == "<string>" and code.co_name.startswith("__")
        if not generated and is_of_user(filename):
            found = CallSite(filename, step.tb_lineno)
        step = step.tb_next
    return found


def lines_of(error: BaseException) -> list[str]:
    """Return what a person reads of an error: its sentence, its notes, and their line; or all of the traceback."""
    lines = [str(error), *getattr(error, "__notes__", ())]
    if shows_all():
        return [*lines, *"".join(traceback.format_exception(error)).splitlines()]
    # A buffer that a rank has changed is noticed by another one, whose line says nothing of it.
    line = None if isinstance(error, BufferReuseError) else line_of_error(error)
    if line is not None and not any(str(line) in text for text in lines):
        lines.append(f"at {line} (--traceback or MINIDIST_TRACEBACK=1 shows the whole way)")
    return lines


def shows_all() -> bool:
    """Return whether the user asks for whole tracebacks."""
    return os.environ.get("MINIDIST_TRACEBACK", "0") not in ("", "0")
