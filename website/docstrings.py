"""Turns the docstrings of minidist, which are plain text, into reStructuredText for Sphinx's autodoc.

paragraphs                      paragraphs; `name` in backticks is code, and no other character is markup
- one  or  1. one               a list
name: what it is. other: that   a list of parameters, where the function has parameters of these names
indented or in columns          shown as it stands: pictures, tables of files; a program has its colours
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Set
from itertools import groupby
from typing import Any

COLUMNS = re.compile(r"\S {2,}\S")
ITEM = re.compile(r"(-|\d+\.) ")
DESCRIPTION = re.compile(r"(?:^|(?<=[.;]\s))(\w+(?:(?:,\s+|\s+and\s+)\w+)*):\s")  # "out: ...", "rows, columns: ..."
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)


def blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the text's blocks of lines without an empty line, and the kind of each."""
    for filled, group in groupby(lines, key=lambda line: bool(line.strip())):
        block = list(group)
        if filled:
            yield kind_of(block), block


def kind_of(block: list[str]) -> str:
    """Return "list", "literal" or "paragraph"."""
    if ITEM.match(block[0]):
        return "list"
    if any(line.startswith(" ") or COLUMNS.search(line) for line in block):
        return "literal"
    return "paragraph"


def language_of(lines: list[str]) -> str:
    """Return "python" for what is a program, and "text" for a picture or a table."""
    try:
        ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:
        return "text"
    return "python"


def escaped(text: str) -> str:
    """Return text in which nothing is markup but code in backticks."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [re.sub(r"([\\*_|`])", r"\\\1", text[end : code.start()]), "\\ ``", code[2], "``\\ "]
        end = code.end()
    return "".join([*parts, re.sub(r"([\\*_|`])", r"\\\1", text[end:])])


def described(text: str, parameters: Set[str]) -> list[str]:
    """Return a paragraph, cut into items of a list where it describes parameters."""
    starts = [
        match.start(1)
        for match in DESCRIPTION.finditer(text)
        if parameters.issuperset(re.split(r",\s+|\s+and\s+", match[1]))
    ]
    if not starts:
        return escaped(text).split("\n")
    before, *parts = (text[i:j] for i, j in zip([0, *starts], [*starts, None], strict=True))
    items = [" ".join(part.split()).partition(": ") for part in parts]
    return [*escaped(before).split("\n"), "", *(f"- **{escaped(names)}**: {escaped(rest)}" for names, _, rest in items)]


def restructured(lines: list[str], parameters: Set[str] = frozenset()) -> list[str]:
    """Return a plain docstring of a function with these parameters as lines of reStructuredText."""
    result: list[str] = []
    # Adjacent literal blocks are one: a picture may have empty lines.
    for kind, group in groupby(blocks(lines), key=lambda pair: pair[0]):
        found = [block for _, block in group]
        if kind == "literal":
            text = [line for block in found for line in [*block, ""]]
            result += [f".. code-block:: {language_of(text)}", "", *(f"    {line}" for line in text)]
            continue
        for block in found:
            text = "\n".join(block)
            result += [*(escaped(text).split("\n") if kind == "list" else described(text, parameters)), ""]
    return result


def parameters_of(item: Any) -> set[str]:
    """Return the names of a function's or a class's parameters."""
    try:
        return set(inspect.signature(item).parameters)
    except (TypeError, ValueError):
        return set()


def process(app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Replace a docstring's lines, as Sphinx asks of this event."""
    if lines and lines[0].startswith("Alias for field number"):  # of a NamedTuple, by Python
        lines[:] = []
    lines[:] = restructured(lines, parameters_of(item))


def skipped(app: Any, what: str, name: str, item: Any, skip: bool, options: Any) -> bool | None:
    """Return True for a class of a module that a class has as an attribute of the same name, as Sphinx asks.

    `Settings: ClassVar[type[BaseModel]] = Settings` is described at the module; None leaves all else as Sphinx has it.
    """
    again = what == "class" and inspect.isclass(item) and item.__qualname__ == name
    return True if again else None


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
