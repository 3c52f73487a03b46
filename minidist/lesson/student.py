"""Notebooks for students: a lesson without its solutions, not run, with cases drawn by a seed of its own.

What shows or checks our solution is left out; the stub that the reader fills stays. The solutions go to another folder,
which is not a part of the package.

Proved by: tests/lesson/test_student.py
"""

import ast
import inspect
from pathlib import Path
from typing import Any

from minidist.lesson.build import tidy
from minidist.lesson.exercise import exercises
from minidist.lesson.runner import SEED
from minidist.lesson.solutions import solution


def student_notebook(source: Path, seed: int | None = None) -> Any:
    """Return the notebook of a lesson without its solutions. seed: draws the cases of its checks; None: the date's."""
    import jupytext

    notebook = jupytext.read(source)
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


def without_solutions(code: str) -> str:
    """Return the code of a cell without the statements that call `solution`, and without the import of it."""
    lines = code.splitlines()
    for statement in reversed(ast.parse(code).body):
        if isinstance(statement, ast.ImportFrom):
            names = [alias for alias in statement.names if alias.name != "solution"]
            if len(names) == len(statement.names):
                continue
            kept = [ast.unparse(ast.ImportFrom(statement.module, names, statement.level))] if names else []
        elif any(_calls_solution(node) for node in ast.walk(statement)):
            kept = []
        else:
            continue
        assert statement.end_lineno is not None
        lines[statement.lineno - 1 : statement.end_lineno] = kept
    return "\n".join(lines).strip("\n")


def _calls_solution(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "solution"


def solutions_of(source: Path) -> str:
    """Return the solutions of a lesson's exercises as text, each with its name; "" when it has none.

    Raises UsageError when the repository's lessons/solutions/ is not at hand.
    """
    own = [name for name in exercises() if name.startswith(f"{source.name[:2]}.")]
    parts = [f"# {name}\n{inspect.getsource(solution(name))}" for name in own]
    return "\n\n".join(parts)
