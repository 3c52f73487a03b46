"""The files that a reader gets without a clone: the lessons without our solutions, and the examples.

setup.py writes them into the wheel, so this module imports nothing but the standard library.

    lessons/NN_name.py, .ipynb    without the statements that show or check our solution
    lessons/*.md, pictures        a link that leads out of the folder becomes the path that it leads to
    mpi_examples                  as they are

Proved by: tests/lesson/test_student.py, tests/test_wheel.py
"""

import ast
import json
import re
from pathlib import Path

FOLDERS = {
    "lessons": ("[0-9][0-9]*_*.py", "[0-9][0-9]*_*.ipynb", "*.md", "pictures/*.svg"),
    "mpi_examples": ("*.py", "*.json", "*.toml", "[0-9]_*/*.py"),
}
SOLUTION = ("solution", "reveal")  # functions that show ours
_CELL = re.compile(r"^(?=# %%)", re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]]*)\]\((\.\./[^()\s]*|solutions)\)")


def handed_out(root: Path, folder: str) -> list[Path]:
    """Return the files of `folder`, a name of FOLDERS, below `root`, that a reader gets."""
    found = {path for pattern in FOLDERS[folder] for path in (root / folder).glob(pattern)}
    # What lies in the folder itself comes first.
    return sorted(found, key=lambda path: (len(path.parts), path))


def handout(path: Path) -> bytes:
    """Return what a reader gets in place of a file. What was handed out once stays as it is."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "lessons":
        if path.suffix == ".py":
            text = _linked("".join(map(_of_cell, _CELL.split(text))))
        elif path.suffix == ".ipynb":
            text = _of_notebook(text)
        elif path.suffix == ".md":
            text = _linked(text)
    return text.encode()


def without_solutions(code: str) -> str:
    """Return the code of a cell without the statements that call `solution` or `reveal`, and without their import."""
    lines = code.splitlines()
    for statement in reversed(ast.parse(code).body):
        if isinstance(statement, ast.ImportFrom):
            names = [alias for alias in statement.names if alias.name not in SOLUTION]
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
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SOLUTION


def _of_cell(text: str) -> str:
    """Return a cell of a .py file, with its head `# %%`, or "" if nothing of it stays."""
    head, _, body = text.partition("\n")
    if not head.startswith("# %%") or "[markdown]" in head:
        return text
    code = without_solutions(body)
    if code == body.strip("\n"):
        return text
    return f"{head}\n{code}\n\n" if code.strip() else ""


def _of_notebook(text: str) -> str:
    notebook = json.loads(text)
    kept = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = _linked(source).splitlines(keepends=True)
        elif cell["cell_type"] == "code":
            code = without_solutions(source)
            if code != source.strip("\n"):
                cell["source"] = code.splitlines(keepends=True)
                # What it printed may be the solution; a cell of imports printed nothing.
                cell["outputs"] = []
        if "".join(cell["source"]).strip():
            kept.append(cell)
    notebook["cells"] = kept
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _linked(text: str) -> str:
    """Return a text whose links lead to files of the folder; of another link the path stays."""

    def path_of(match: re.Match[str]) -> str:
        words, path = match[1], match[2].removeprefix("../")
        return f"`{path}`" if path.endswith(words) else f"{words} (`{path}`)"

    return _LINK.sub(path_of, text)
