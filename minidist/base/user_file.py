"""A function or class in a user's file: FILE.py:FUNCTION or FILE.py:CLASS, wherever a command or call takes a name.

Proved by: tests/base/test_user_file.py
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from minidist.base.errors import MinidistError, UsageError, nearest, quoted, quoted_path, reason, text_of

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def without_ours(frames: Sequence[FrameSummary]) -> list[FrameSummary]:
    """Return the frames of a traceback that are not of this package; all of them where it has no others."""
    return [frame for frame in frames if not frame.filename.startswith(_PACKAGE)] or list(frames)


class ProgramError(MinidistError):
    """A user's program has raised an exception, or ended with an error. The text is its traceback, without our frames.

    after: the files that run the program; the traceback begins behind the last frame of any. error: the exception.
    """

    exit_code = 1

    def __init__(self, error: BaseException, *after: str) -> None:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        last_of_ours = max((k for k, frame in enumerate(frames) if frame.filename in after), default=-1)
        text = "".join(traceback.format_list(without_ours(frames[last_of_ours + 1 :])))
        notes = "\n".join(getattr(error, "__notes__", ()))
        self.error = error
        super().__init__(f"the program raised {type(error).__name__}: {text_of(error)}\n{text}{notes}")


def is_user_function(source: str) -> bool:
    """Return whether `source` is written FILE.py:FUNCTION."""
    return ".py:" in source


def is_file(path: str | Path) -> bool:
    """Return whether the path names a file; False, too, for what no path can be."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long, or with a NUL character
        return False


def without_function(source: str, kind: str = "function") -> str:
    """Return the sentence about a FILE.py where FILE.py:FUNCTION, or FILE.py:CLASS, is expected."""
    return f"{quoted_path(source)} names no {kind}; write FILE.py:{kind.upper()}"


def load_function(source: str, kind: str = "function") -> Callable[..., Any]:
    """Import the file of FILE.py:FUNCTION and return the function. kind: "class" where it is one, for the sentences.

    UsageError when the file or the function does not exist, and with the file's line when importing it raises.
    """
    path, _, name = source.rpartition(":")
    if not is_user_function(source):
        raise UsageError(without_function(source, kind))
    if not is_file(path):
        raise UsageError(f"file {quoted_path(path)} does not exist; write FILE.py:{kind.upper()}")

    # The module is known to Python while it runs, because dataclasses and pickle look their module up.
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    # Its neighbours can be imported, as under `python FILE.py`; last, so that none takes the place of another module.
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except MinidistError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{quoted_path(path, marks=False)} cannot be imported: {reason(error, named=True)}; correct the file"
        ) from error
    finally:
        # A file that is called like a module of Python's must not take its place.
        if before is not None:
            sys.modules[module.__name__] = before

    function = getattr(module, name, None)
    if not callable(function):
        names = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        raise UsageError(
            f"{quoted_path(path, marks=False)} has no {kind} {quoted(name)}{nearest(name, names)}; write"
            f" FILE.py:{kind.upper()}"
        )
    return function  # type: ignore[no-any-return]
