"""Lessons and examples on the disk of whoever has installed minidist: where they are, and a copy to work on.

In a clone they are the folders of the repository; a wheel has them in minidist/shipped (setup.py).

Proved by: tests/lesson/test_student.py, tests/test_wheel.py
"""

import ast
from pathlib import Path

from minidist.base.errors import UsageError, quoted_path
from minidist.base.files import writing
from minidist.course.lesson.handout import handed_out, handout

PACKAGE = Path(__file__).resolve().parents[2]
WITHOUT_DOCSTRING = {
    "ds_config.json": "A DeepSpeed configuration file, for deepspeed_file.py, `minidist explain` and lesson 10b.",
    "first_steps.py": "The first program of the README: data-parallel training with one optimizer and one wrapper.",
}


def shipped(folder: str) -> list[Path]:
    """Return the files of "lessons" or "mpi_examples". Raises UsageError where this installation has none."""
    for root in (PACKAGE / "shipped", PACKAGE.parent):
        found = handed_out(root, folder)
        if found:
            return found
    raise UsageError(
        f"this installation of minidist, {quoted_path(PACKAGE, marks=False)}, has no {folder}; install its wheel, or"
        " run this in a clone"
    )


def example(name: str) -> Path:
    """Return a file of mpi_examples: the one of this folder, or that of the installation."""
    here = next(iter([*Path("mpi_examples").glob(name), *Path("mpi_examples").glob(f"[0-9]_*/{name}")]), None)
    return here or next(path for path in shipped("mpi_examples") if path.name == name)


def copy(folder: str, target: Path) -> list[Path]:
    """Write what a reader gets of "lessons" or "mpi_examples" to `target`; returns the files.

    Raises UsageError before anything is written when a file is there with another text.
    """
    found = shipped(folder)
    with writing(f"the {folder.removeprefix('mpi_')}", target, "choose another folder"):
        target.mkdir(parents=True, exist_ok=True)
    root = next(parent for parent in found[0].parents if parent.name == folder)
    texts = {target / path.relative_to(root): handout(path) for path in found}
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == text):
            raise UsageError(f"{quoted_path(path)} exists already and is another file; choose another folder")
    with writing(f"the {folder.removeprefix('mpi_')}", target, "choose another folder"):
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    return list(texts)


def about(path: Path) -> str:
    """Return the first sentence about an example, from its docstring or its first comment."""
    if path.name in WITHOUT_DOCSTRING:
        return WITHOUT_DOCSTRING[path.name]
    text = path.read_text(encoding="utf-8")
    words = (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text.partition("\n")[0].strip("# ")
    return " ".join(words.split()).partition(". ")[0].rstrip(".:") + "."
