"""The ending of a file's name decides what is written to it.

    format_of(Path("plan.svg"), None, {"text": (".txt",), "svg": (".svg",)}, "text")     "svg"

Proved by: tests/commands/test_endings.py
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from minidist.base.errors import UsageError, quoted, quoted_path


def format_of(
    output: Path | None,
    form: str | None,
    endings: Mapping[str, Sequence[str]],
    default: str = "",
    flags: tuple[str, str] = ("--output", "--format"),
) -> str:
    """Return the format of a result: what `form` says, else the one that the name of the file ends in, else `default`.

    endings: of each format the endings of its files; the first format that has an ending is the one it names. flags:
    how the user gives the file and the format. A device or a pipe has no ending. Raises UsageError for an ending that
    no format has, and for one that is not of `form`.
    """
    if output is None or (output.exists() and not output.is_file()):
        return form or default
    known = list(dict.fromkeys(ending for each in endings.values() for ending in each))
    ending = output.suffix
    name = f"{flags[0]} {quoted_path(output.name)}"
    if form is not None:
        if ending not in endings[form]:
            raise UsageError(
                f"{flags[1]} {quoted(form, marks=False)} contradicts {name}; end the name in"
                f" {_either(endings[form])}, or leave out {flags[1]}"
            )
        return form
    if ending not in known:
        raise UsageError(f"{name}: the ending of the name decides what is written; end it in {_either(known)}")
    return next(form for form, each in endings.items() if ending in each)


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
