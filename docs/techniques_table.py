"""The table of docs/techniques.md that has one row for each folder of minidist/techniques.

    python docs/techniques_table.py        writes the table into the page

A row is what the docstring of the folder's extension.py says: its first line, what a rank sends, what the job is equal
to, the tests and the lessons.

Proved by: tests/techniques/test_page.py
"""

import re
import sys
from ast import get_docstring, parse
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "techniques.md"
START, END = "<!-- from here on: python docs/techniques_table.py -->\n", "<!-- end of the table -->\n"
HEAD = "\n| technique | folder | a rank sends per step | equal to | lesson |\n|---|---|---|---|---|\n"
FIELDS = re.compile(
    r"\nA rank sends per step: (?P<sends>.*?)\.\nEqual to: (?P<equal>.*?)\.(?:\nLesson: (?P<lessons>.*?)\.)?"
    r"\n\nProved by: (?P<tests>.*)\Z",
    flags=re.DOTALL,
)


def row(path: Path) -> str:
    """Return the row of a technique. path: of its extension.py, which raises ValueError without the fields."""
    text = get_docstring(parse(path.read_text(encoding="utf-8"))) or ""
    found = FIELDS.search(text)
    if found is None:
        raise ValueError(f"{path}: the docstring must end with `A rank sends per step:`, `Equal to:` and `Proved by:`")
    fields = {name: " ".join((words or "").split()) for name, words in found.groupdict().items()}
    tests = ", ".join(f"[{Path(name).name}](../{name})" for name in fields["tests"].split(", "))
    lessons = [name for name in fields["lessons"].split(", ") if name]
    links = ", ".join(f"[{name.partition('_')[0]}](../lessons/{name}.ipynb)" for name in lessons)
    folder = path.parent.name
    cells = (
        text.partition("\n")[0].rstrip("."),
        f"[{folder}/](../minidist/techniques/{folder})",
        fields["sends"],
        f"{fields['equal']}: {tests}",
        links,
    )
    # A bar would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def document(page: str) -> str:
    """Return the page with the table of all folders; ValueError for a page without the place for it."""
    if START not in page or END not in page:
        raise ValueError(f"{PAGE} has no place for the table; add the two comments {START.strip()} and {END.strip()}")
    before, _, rest = page.partition(START)
    rows = [row(path) for path in sorted((ROOT / "minidist" / "techniques").glob("*/extension.py"))]
    return before + START + HEAD + "".join(rows) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    try:
        PAGE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"techniques_table.py: {error}")
