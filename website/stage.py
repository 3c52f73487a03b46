"""Writes the pages of the site into a folder, from which Sphinx builds it: `python -m website.stage build/site/pages`.

    README.md                       index.md
    docs/*.md, CONTRIBUTING.md      as they are
    lessons/*.ipynb, *.md           as they are, in the order of their numbers
    packages with an __all__        api/minidist.comm.md
    any other file a page links to  source/tests/comm/test_mesh.py.md: the file with numbers of lines

A link of a page to a file of the repository becomes a link to that file's page. A link to what does not exist is left,
and Sphinx reports it.
"""

import ast
import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from posixpath import normpath, relpath

from website.lesson_map import drawn

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\[[^\[\]]*\]\()([^()\s]+)(\))")
MERMAID = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash"}
SKIPPED = {"__pycache__"}


class Site:
    """The pages, by name, and the files of the repository that they show.

    written: name of the page, "docs/torch.md", to its text. home: path in the repository to the name of its page.
    """

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self.home: dict[str, str] = {"README.md": "index.md", "": "index.md"}
        for path in (
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            *named("docs/*.md"),
            *named("docs/decisions/*.md"),
            *named("lessons/*.md"),
        ):
            self.home[path] = path
        for path in named("lessons/[0-9][0-9]*_*.ipynb"):
            self.home[path] = path
        for package in packages():
            self.home[package.replace(".", "/")] = f"api/{package}.md"
        self.home["docs"] = "docs/index.md"
        self.home["lessons"] = "lessons/README.md"

    def linked(self, text: str, path: str) -> str:
        """Return the text of the file at `path` with links to pages of the site."""
        here, page = os.path.dirname(path), self.home[path]

        def replace(match: re.Match[str]) -> str:
            target, _, anchor = match[2].partition("#")
            if not target or ":" in target:
                return match[0]
            found = normpath(f"{here}/{target}").strip("/") if here else normpath(target)
            place = self.place_of(found)
            if place is None:
                return match[0]
            return f"{match[1]}{relpath(place, os.path.dirname(page) or '.')}{'#' * bool(anchor)}{anchor}{match[3]}"

        return LINK.sub(replace, text)

    def place_of(self, path: str) -> str | None:
        """Return the page that shows a path of the repository, made where there is none; None where nothing is."""
        path = path.removesuffix("/")
        if path not in self.home and path.endswith((".svg", ".png")) and (ROOT / path).exists():
            return path
        if path not in self.home and (ROOT / path).exists():
            self.home[path] = f"source/{path}.md"
            self.written[f"source/{path}.md"] = self.source_page(path)
        return self.home.get(path)

    def source_page(self, path: str) -> str:
        """Return a page of a file, or of what a folder holds."""
        header = f"---\norphan: true\nnosearch: true\n---\n# {path}\n\n"
        file = ROOT / path
        if file.is_dir():
            names = sorted(part.name for part in file.iterdir() if part.name not in SKIPPED)
            return header + "".join(f"- `{name}`\n" for name in names)
        text = file.read_text()
        fence = "`" * (1 + max(map(len, re.findall("`{3,}", text)), default=2))
        options = f"{{code-block}} {LANGUAGES.get(file.suffix, 'text')}\n:linenos:"
        return f"{header}{fence}{options}\n\n{text}\n{fence}\n"

    def stage(self, folder: Path) -> None:
        """Write every page below a folder, which is emptied first."""
        shutil.rmtree(folder, ignore_errors=True)
        for pictures in ("lessons/pictures", "docs/pictures"):
            shutil.copytree(ROOT / pictures, folder / pictures)
        for path in [path for path in self.home if path.endswith(".md")]:
            self.written[self.home[path]] = self.linked((ROOT / path).read_text(), path)
        for path in named("lessons/*.ipynb"):
            self.written[path] = json.dumps(self.notebook(path))
        self.add_contents()
        self.add_map(folder)
        # An address that ends in a folder shows that folder's index.
        self.written["lessons/index.md"] = TO_THE_LESSONS
        for name, text in self.written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def notebook(self, path: str) -> dict[str, object]:
        """Return a lesson's notebook with links to pages of the site."""
        notebook = json.loads((ROOT / path).read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked("".join(cell["source"]), path)
        return dict(notebook)

    def add_contents(self) -> None:
        """Add the order of the pages, which the theme shows at the side and in the links to the next page."""
        self.written["docs/index.md"] = "# Guides\n\n" + contents(
            [path.removeprefix("docs/") for path in (*named("docs/*.md"), *named("docs/decisions/*.md"))], hidden=False
        )
        self.written["api/index.md"] = API + contents([f"{package}.md" for package in packages()], hidden=False)
        for package in packages():
            self.written[f"api/{package}.md"] = reference(package)
        lessons = [path.removeprefix("lessons/") for path in named("lessons/*.ipynb")]
        self.written["lessons/README.md"] += contents([*lessons, "glossary.md"])
        pages = ["lessons/README.md", "docs/index.md", "api/index.md", "CONTRIBUTING.md", "CHANGELOG.md"]
        self.written["index.md"] += contents(pages)

    def add_map(self, folder: Path) -> None:
        """Draw the graph of the lessons. Its source is for a program that the site does not include."""
        picture = "![Each lesson with an arrow to the lessons that build on it](pictures/map.svg)\n"
        page = "lessons/README.md"
        (source,) = MERMAID.findall(self.written[page])
        (folder / "lessons/pictures/map.svg").write_text(drawn(source))
        self.written[page] = MERMAID.sub(picture, self.written[page])


TO_THE_LESSONS = """---
orphan: true
nosearch: true
---
# Lessons

```{raw} html
<meta http-equiv="refresh" content="0; url=README.html">
```

[The lessons](README.md)
"""

API = """# API reference

Made from the docstrings. A package's names are imported from the package: `from minidist.comm import launch`.

"""


def named(pattern: str) -> list[str]:
    """Return the files of the repository that fit a pattern, sorted."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def packages() -> list[str]:
    """Return the public packages: those that name what they offer in an __all__."""
    found = []
    for file in sorted((ROOT / "minidist").rglob("__init__.py")):
        names = {
            target.id
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if "__all__" in names:
            found.append(".".join(file.parent.relative_to(ROOT).parts))
    return found


def reference(package: str) -> str:
    """Return the page of a package. What it imports from another package is described there."""
    module = importlib.import_module(package)
    homes = {name: getattr(getattr(module, name), "__module__", None) or package for name in module.__all__}
    foreign = sorted(name for name, home in homes.items() if home.startswith("minidist.") and package not in home)
    left_out = f"   :exclude-members: {', '.join(foreign)}\n" if foreign else ""
    return f"# {package}\n\n```{{eval-rst}}\n.. automodule:: {package}\n{left_out}```\n"


def contents(pages: list[str], hidden: bool = True) -> str:
    """Return a table of contents of pages, named relative to the page that has it."""
    return "\n```{toctree}\n" + ":hidden:\n" * hidden + ":maxdepth: 1\n\n" + "\n".join(pages) + "\n```\n"


if __name__ == "__main__":
    Site().stage(Path(sys.argv[1]))
