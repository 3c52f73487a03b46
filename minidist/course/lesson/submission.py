"""The functions of a submission. Of its Python file or notebook only what the functions need is run.

A notebook trains, draws and checks; to grade it takes the functions, what they name, and what that names. The
statements run in their order, in the process of the answer.

Proved by: tests/lesson/test_grade.py
"""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.read_file import parse_json
from minidist.comm.has_run import has_run
from minidist.course.lesson.exercise import Exercise
from minidist.course.lesson.numbers import current


class BrokenSubmissionError(UsageError):
    """A submission that is no Python, or no notebook."""


@dataclass(frozen=True)
class Source:
    """What defines the functions of one exercise. adapter, generator: as those of an exercise."""

    text: str
    filename: str
    functions: tuple[str, ...]
    adapter: Callable[[dict[str, Any]], Callable[..., Any]] | None = None
    generator: bool = False

    def load(self) -> Callable[..., Any]:
        """Run the source in a new namespace and return the function that is judged."""
        namespace: dict[str, Any] = {"__name__": "submission"}
        exec(compile(self.text, self.filename, "exec"), namespace)
        if self.adapter is None:
            function: Callable[..., Any] = namespace[self.functions[0]]
            return function
        # An adapter may drop what a function returns, and with it the sign that none of its lines has run.
        for name in self.functions:
            if isinstance(namespace[name], FunctionType) and not self.generator:
                namespace[name] = _that_has_run(namespace[name])
        return self.adapter(namespace)


def _that_has_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that raises NotRunError where it returns a generator or a coroutine."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        return has_run(function(*arguments, **keywords), function, None)

    return run


def read(path: Path) -> ast.Module:
    """Return the code of a .py or .ipynb file.

    Raises UsageError when it is neither, and BrokenSubmissionError when it cannot be parsed.
    """
    if path.suffix not in (".py", ".ipynb"):
        raise UsageError(f"{quoted_path(path)} is not a submission: it must be a .py or .ipynb file")
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".ipynb":
        try:
            cells = [cell for cell in parse_json(text, any_number=True)["cells"] if cell["cell_type"] == "code"]
            lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
        except (ValueError, KeyError, TypeError):
            raise BrokenSubmissionError(f"{quoted(path.name)} is not a notebook; save it again as .ipynb") from None
        # Magics are Jupyter's and not Python's.
        text = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line} of its code" if line else ""
        text = str(getattr(error, "msg", error)) or type(error).__name__
        raise BrokenSubmissionError(f"{path.name}{where}: {text}; it must be Python") from None


def source_of(exercise: Exercise, path: Path, tree: ast.Module) -> Source:
    """Return what defines the answer to an exercise. Raises UsageError when the submission has none."""
    wanted = exercise.functions or (_checked(exercise.name, tree) or exercise.name.partition(".")[2],)
    defined = {name for statement in tree.body for name in _bound(statement)}
    for name in wanted:
        if name not in defined:
            how = "" if exercise.functions else f' and no check("{exercise.name}", your_function)'
            raise UsageError(f"{path.name} defines no {name}(){nearest(name, defined)}{how}")
    try:
        return Source(_needed(tree, wanted), path.name, wanted, exercise.adapter, exercise.generator)
    except RecursionError:
        raise BrokenSubmissionError(f"{path.name} has an expression that is nested too deeply; write it flat") from None


def _checked(name: str, tree: ast.Module) -> str:
    """Return the function that the first `check(name, function)` names, or ""; the name may be one of before.

    The first, because a lesson checks the reader's function first and typical mistakes after it.
    """
    for node in (node for statement in tree.body for node in ast.walk(statement)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"):
            continue
        match node.args:
            case [ast.Constant(value=str(value)), ast.Name(id=function), *_] if current(value) == name:
                return function
    return ""


def _needed(tree: ast.Module, wanted: Iterable[str]) -> str:
    """Return the statements that bind these names, or names that those statements use, in their order."""
    statements = [(statement, _bound(statement), _used(statement)) for statement in tree.body]
    names, before = set(wanted), 0
    while before != len(names):
        before = len(names)
        for _, bound, used in statements:
            if bound & names:
                names |= used
    kept = [statement for statement, bound, _ in statements if bound & names]
    return ast.unparse(ast.Module(kept, []))


def _used(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds or changes: `x = 1`, `def x`, `import x`, `x[0] = 1`, `x.append(1)`."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Expr):
        match statement.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
                return {name}
        return set()
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            base = node.value
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                names.add(base.id)
    return names
