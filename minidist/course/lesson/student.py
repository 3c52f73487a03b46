"""Notebooks for students: a lesson without its solutions, not run, with cases drawn by a separate seed.

What shows or checks our solution is left out; the stub that the reader fills stays. The solutions go to another folder,
which is not a part of the package.

Proved by: tests/lesson/test_student.py
"""

import inspect
from pathlib import Path
from typing import Any

from minidist.base.extras import extra
from minidist.course.lesson.build import tidy
from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.handout import without_solutions
from minidist.course.lesson.numbers import number_of
from minidist.course.lesson.runner import SEED
from minidist.course.lesson.solutions import solution


def student_notebook(source: Path, seed: int | None = None) -> Any:
    """Return the notebook of a lesson without its solutions. seed: draws the cases of its checks; None: the date's."""
    notebook = extra("jupytext", "minidist lesson build").read(source)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = without_solutions(cell.source)
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    if seed is not None:
        first = next(number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        cell = notebook.cells[first]
        cell.source = f'import os\n\nos.environ["{SEED}"] = "{seed}"\n\n{cell.source}'
    tidy(notebook)
    return notebook


def solutions_of(source: Path) -> str:
    """Return the solutions of a lesson's exercises as text, each with its name; "" when it has none.

    Raises UsageError when the repository's lessons/solutions/ is not at hand.
    """
    own = [name for name in exercises() if name.startswith(f"{number_of(source)}.")]
    parts = [f"# {name}\n{inspect.getsource(solution(name))}" for name in own]
    return "\n\n".join(parts)
