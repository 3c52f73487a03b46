"""What a reader has solved and tried, in a file of the user's home folder.

Proved by: tests/lesson/test_puzzles.py, tests/lesson/test_solutions.py
"""

import json
import os
from pathlib import Path

from minidist.base.errors import UsageError, quoted_path
from minidist.base.files import writing
from minidist.base.read_file import read_json


def progress_file() -> Path:
    """Return where progress is kept: in MINIDIST_HOME, else in the user's folder of data."""
    home = os.environ.get("MINIDIST_HOME")
    if home:
        return Path(home) / "progress.json"
    try:
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    except RuntimeError:
        raise UsageError("progress is not kept: there is no home folder; set MINIDIST_HOME to a folder") from None
    return Path(data) / "minidist" / "progress.json"


def names_of(what: str) -> list[str]:
    """Return the names under a key of the file: "puzzles" that are solved, "passed" exercises, or "tries".

    Raises UsageError when the file cannot be read.
    """
    names = _table().get(what, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"the file of progress {quoted_path(progress_file())} has no list of {what}; move it away to begin anew"
        )
    return names


def add(what: str, name: str) -> None:
    """Keep a name under a key of the file. Raises UsageError when this cannot be written."""
    path, names, table = progress_file(), names_of(what), _table()
    if name in names:
        return
    with writing("progress", path, "set MINIDIST_HOME to a folder that you can write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads at the same time finds the old file or the new one.
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({**table, what: sorted([*names, name])}) + "\n", encoding="utf-8")
        new.replace(path)


def _table() -> dict[str, object]:
    """Return what the file has; nothing where there is none."""
    path = progress_file()
    if not os.path.exists(path):  # False, too, where nobody may look
        return {}
    remedy = "move it away to begin anew"
    table = read_json(path, "the file of progress", remedy)
    if not isinstance(table, dict):
        raise UsageError(f"the file of progress {quoted_path(path)} has no lists of names; {remedy}")
    return table
