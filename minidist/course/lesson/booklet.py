"""A booklet of the core lessons to print, a spread each: one HTML file of A4 pages, which a browser turns into a PDF.

    python -m minidist.course.lesson.booklet build/booklet.html

On the left the case, the questions, the picture and some code; on the right the idea, what was measured, a bug, the
takeaway and a second picture. Text and pictures are those of the committed notebooks.

Proved by: tests/lesson/test_booklet.py
"""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from minidist.base.extras import extra
from minidist.course.lesson.build import sources
from minidist.course.lesson.numbers import number_of
from minidist.course.lesson.slides import ASKED, Block, Part, first_that_fit, guesses, parts_of, printed_by, text_block

HTML = Path(__file__).with_name("booklet.html").read_text(encoding="utf-8")
PAGE_ROOM, PICTURE = 190.0, 75.0  # in the unit of a block's height: a page has about 42 lines of text


def booklet(folder: Path) -> str:
    """Return the booklet of the core lessons of a folder with notebooks, as HTML."""
    read = extra("nbformat", "the booklet").read
    core = [path for path in sources(folder) if number_of(path).isdecimal()]
    spreads = [spread(read(path.with_suffix(".ipynb"), as_version=4)) for path in core]
    return HTML.replace("PAGES", "\n".join(chain.from_iterable(spreads)))


def spread(notebook: Any) -> tuple[str, str]:
    """Return the two pages of a lesson."""
    title, parts = parts_of(notebook)
    case, predict, idea, code, checked, broken, _, takeaway = (parts[number] for number in range(1, 9))
    asked = [text_block(f"- {found}?") for cell in predict.cells for found in ASKED.findall(printed_by(cell))]
    cells = list(chain.from_iterable(part.cells for part in parts.values()))
    found = [text_block(f"- {words}: **{value}**") for words, value in guesses(cells)]
    drawn = pictures(idea) + pictures(checked)
    left = [text_block(f"# {title}"), *case.text(), *asked, *drawn[:1], *first_that_fit(code)]
    right = [text_block("## The idea"), *idea.text()[:1], text_block("## Measured"), *found, text_block("## Break it")]
    right += [*broken.text()[:1], text_block("## Takeaway"), *takeaway.text()[:1]]
    return page(left), page([*right, *drawn[1:2]])


def pictures(part: Part) -> list[Block]:
    """Return the pictures of a part."""
    return [Block(slide.body, PICTURE) for slide in part.pictures()]


def page(blocks: Sequence[Block]) -> str:
    """Return a page with those of the blocks that fit, in their order."""
    left, shown = PAGE_ROOM, ""
    for block in blocks:
        if block.height <= left:
            left -= block.height
            shown += block.body
    return f"<section>{shown}</section>"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(booklet(Path("lessons")), encoding="utf-8")
