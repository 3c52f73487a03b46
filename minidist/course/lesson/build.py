"""Builds the notebooks: lessons/NN_name.py, which is written and reviewed, becomes lessons/NN_name.ipynb with outputs.

    python -m minidist.course.lesson.build              every lesson
    python -m minidist.course.lesson.build 00 04        these
    python -m minidist.course.lesson.build --check      write nothing; exit 1 when a committed notebook is stale

Notebooks are committed, so that their pictures show without running anything. One is stale when its source or the text
that it prints differs. Numbers without a unit that have a decimal point may differ in their last digits from
machine to machine, and so may pictures: neither is compared. Virtual times and bytes have a unit and are compared.

Proved by: tests/lesson/test_lessons.py
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minidist.base.errors import MinidistError, UsageError, quoted, quoted_path
from minidist.base.extras import extra
from minidist.course.lesson.numbers import SOURCES, current, number_of
from minidist.course.lesson.runner import SEED

TIMEOUT = 120  # seconds per cell; a whole lesson should take less than 20
_FLOAT = re.compile(r"-?\b\d+(\.\d+([eE][-+]?\d+)?|[eE][-+]?\d+)\b(?! ?(µs|ms|ns|s|B|kB|MB|GB)\b)")
_LOCAL = re.compile(r"^ *mpiexec: .*\n?", re.MULTILINE)  # whether a machine has an MPI


class LessonError(MinidistError):
    """A cell of a lesson raised an exception that it did not announce."""


def sources(folder: Path, numbers: Sequence[str] = ()) -> list[Path]:
    """Return the lessons of a folder, or those with the given numbers."""
    found, wanted = sorted(folder.glob(SOURCES)), [current(number) for number in numbers]
    if not found:
        raise UsageError(
            f"there are no lessons in {quoted_path(folder)}; write them there with: minidist lesson copy"
            f" {quoted_path(folder, marks=False)}"
        )
    missing = [number for number in wanted if number not in map(number_of, found)]
    if missing:
        raise UsageError(
            f"no lesson {quoted(', '.join(missing), marks=False)} in {quoted_path(folder, marks=False)}; there are"
            f" {', '.join(path.stem for path in found) or 'none'}"
        )
    return [path for path in found if not numbers or number_of(path) in wanted]


def make(source: Path) -> Any:
    """Run a lesson in a fresh kernel, in the folder above lessons/; returns the notebook with its outputs."""
    jupytext, nbclient, _ = (extra(name, "a lesson that runs") for name in ("jupytext", "nbclient", "ipykernel"))
    notebook = jupytext.read(source)
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(source.resolve().parents[1])}},
    )

    # A kernel starts in the repository's root, where `python lessons/NN_name.py` runs too. Checks draw the same cases
    # in every build.
    try:
        with TemporaryDirectory() as home:  # where nobody has tried an exercise
            client.execute(env={**os.environ, SEED: "0", "MINIDIST_HOME": home})
    except nbclient.exceptions.CellExecutionError as error:
        raise LessonError(f"{source.name}: {error}") from None
    tidy(notebook)
    return notebook


def tidy(notebook: Any) -> None:
    """Remove from a notebook what differs from run to run or from machine to machine."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {key: value for key, value in cell.metadata.items() if key in ("tags", "jupyter")}
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)


def merged(outputs: Sequence[Any]) -> list[Any]:
    """Join consecutive texts of one stream: how they are cut depends on timing."""
    result: list[Any] = []
    for output in outputs:
        if result and output.output_type == "stream" == result[-1].output_type and output.name == result[-1].name:
            result[-1].text += output.text
        else:
            result.append(output)
    return result


def content(notebook: Any) -> list[tuple[str, str, str]]:
    """Return what is compared: kind, source and printed text of each cell."""
    return [(cell.cell_type, cell.source, printed(cell)) for cell in notebook.cells]


def printed(cell: Any) -> str:
    """Return the text of a cell's outputs, without what may differ between machines."""
    texts = [
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", ())
        if not {"image/png", "image/svg+xml"} & output.get("data", {}).keys()
    ]
    return _FLOAT.sub("#", _LOCAL.sub("", "".join(texts)))


def _nbformat() -> Any:
    """Return the module nbformat, of an extra."""
    return extra("nbformat", "a notebook")


def write(notebook: Any, path: Path) -> None:
    """Write a notebook to a file."""
    _nbformat().write(notebook, path)


def stale(source: Path, make: Callable[[Path], Any] = make) -> str:
    """Run the lesson with `make`; return one sentence on why the committed notebook differs from the result, or ""."""
    path = source.with_suffix(".ipynb")
    if not path.exists():
        return f"{path.name} is missing"
    committed = _nbformat().read(path, as_version=4)
    written = [(cell.cell_type, cell.source) for cell in extra("jupytext", "a lesson").read(source).cells]
    if written != [(cell.cell_type, cell.source) for cell in committed.cells]:
        return f"{path.name} was built from another {source.name}"
    for number, (old, new) in enumerate(zip(content(committed), content(make(source)), strict=True)):
        if old != new:
            return f"{path.name}: cell {number} prints something else now:\n  was  {old[2]!r}\n  is   {new[2]!r}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m minidist.course.lesson.build", description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="*", metavar="NN", help="numbers of lessons; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a notebook is stale")
    parser.add_argument("--folder", type=Path, default=Path("lessons"), help="where the lessons are")
    flags = parser.parse_args(arguments)
    code = 0

    try:
        for source in sources(flags.folder, flags.lessons):
            print(source.name, flush=True)
            # One stale notebook does not end the check of the others.
            if flags.check:
                problem = stale(source)
                if problem:
                    print(
                        f"stale: {problem}\nbuild it again: python -m minidist.course.lesson.build {number_of(source)}",
                        file=sys.stderr,
                    )
                    code = 1
            else:
                write(make(source), source.with_suffix(".ipynb"))
    except MinidistError as error:
        print(f"minidist: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
