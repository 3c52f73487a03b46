"""A deck of slides of a lesson, 8 to 13 of them: one HTML file that needs no other file and no network.

    lesson ── build.make: runs every cell now ──▶ notebook with outputs ──▶ what a lecture shows of each part

    1 the case | 2 the questions | 3 the idea, its pictures | the stepper | 4 the code | 5 what was predicted and
    measured, a table, a picture | 6 a bug and what it does | 7 the exercise | 8 the takeaway

The numbers and the pictures are those of the traces of this run. A slide holds what fits on a screen at a size that is
read from the back of a room; what does not fit is left out, and so are solutions. In a browser the arrow keys turn the
pages; printing gives one page per slide.

Proved by: tests/lesson/test_slides.py
"""

import ast
import base64
import html
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any

from minidist.base.extras import extra
from minidist.course.lesson.build import make
from minidist.course.lesson.handout import without_solutions
from minidist.course.lesson.prediction import BLANK

# Of a screen of 16:9, in hundredths of its height; PAGE has the same sizes.
PAGE = Path(__file__).with_name("slides.html").read_text(encoding="utf-8")
ROOM, TEXT_LINE, CODE_LINE, GAP = 76.0, 4.5, 3.2, 3.0
TEXT_COLUMNS, CODE_COLUMNS = 96, 100
PICTURES = 2  # of part 3
GUESS = re.compile(rf"^(.*): (.*); your guess: {BLANK}$", re.MULTILINE)
ASKED = re.compile(rf"^(.*)\? Your guess: {BLANK}", re.MULTILINE)


@dataclass(frozen=True)
class Slide:
    """One slide: its heading as text, its body as HTML, and its height in hundredths of a screen."""

    heading: str
    body: str
    height: float = 0.0


@dataclass(frozen=True)
class Block:
    """A paragraph, or some code or output, as HTML, and how high it is."""

    body: str
    height: float


@dataclass
class Part:
    """A part of a lesson: its heading, its paragraphs as Markdown, and its cells of code."""

    heading: str
    texts: list[str]
    cells: list[Any]

    def text(self) -> list[Block]:
        """Return the paragraphs."""
        return [text_block(text) for text in self.texts]

    def pictures(self) -> Iterator[Slide]:
        """Yield a slide for each picture."""
        for data in outputs(self.cells, "image/svg+xml"):
            encoded = base64.b64encode(data["image/svg+xml"].encode()).decode()
            alt = html.escape(data.get("text/plain", ""))
            yield Slide(self.heading, f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">')

    def tables(self) -> Iterator[str]:
        """Yield what cells print, without predictions; the longest that fit first."""
        texts = [GUESS.sub("", printed_by(cell)).strip("\n") for cell in self.cells if "check(" not in cell.source]
        yield from sorted((text for text in texts if text and fits(code_block(text))), key=len, reverse=True)


def deck(sources: list[Path]) -> str:
    """Run the lessons and return their slides as one HTML page.

    Raises UsageError where the packages that run a notebook are missing, LessonError when a cell fails.
    """
    extra("markdown_it", "minidist lesson slides")  # before minutes of lessons
    notebooks = [make(source) for source in sources]
    return page([slide for notebook in notebooks for slide in slides_of(notebook)])


def slides_of(notebook: Any) -> list[Slide]:
    """Return the slides of a notebook that has its outputs."""
    title, parts = parts_of(notebook)
    case, predict, idea, code, checked, broken, exercise, takeaway = (parts[number] for number in range(1, 9))
    everything = list(chain.from_iterable(part.cells for part in parts.values()))
    asked = [found for cell in predict.cells for found in ASKED.findall(printed_by(cell))]
    questions = [text_block(f"- {question}?") for question in asked]
    measured = [text_block(f"- {words}: **{value}**") for words, value in guesses(everything)]
    steps = [data["text/html"] for data in outputs(everything, "text/html") if "<iframe" in data["text/html"]]
    slides = [
        together(title, case.text()),
        together(predict.heading, [*predict.text(), *questions]),
        together(idea.heading, idea.text()),
        *list(idea.pictures())[:PICTURES],
        *(Slide("Step by step", frame) for frame in steps[:1]),
        together(code.heading, first_that_fit(code)),
        together("Predicted and measured", measured),
        *(together(checked.heading, [code_block(table, "output")]) for table in list(checked.tables())[:1]),
        *list(checked.pictures())[:1],
        together(broken.heading, first_that_fit(broken)),
        together(exercise.heading, [*exercise.text()[:1], *stubs(exercise)]),
        together(takeaway.heading, takeaway.text()),
    ]
    return [slide for slide in slides if slide.body]


def parts_of(notebook: Any) -> tuple[str, dict[int, Part]]:
    """Return the title of a lesson and its parts by their numbers; what comes before them has number 0."""
    parts: dict[int, Part] = defaultdict(lambda: Part("", [], []))
    title, number = "", 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts[number].cells.append(cell)
            continue
        for text in re.split(r"^(?=#{1,2} )", cell.source, flags=re.MULTILINE):
            found = re.match(r"## (\d+) (.*)|# (.*)", text)
            if found and found[3]:
                title = found[3]
            elif found:
                number = int(found[1])
                parts[number].heading = found[2]
            rest = text[found.end() :] if found else text
            parts[number].texts += [block for block in re.split(r"\n\s*\n(?=\S)", rest.strip()) if block]
    return title, parts


def outputs(cells: Sequence[Any], kind: str) -> Iterator[Any]:
    """Yield the outputs of the cells that have a form of this kind."""
    for cell in cells:
        yield from (output.data for output in cell.get("outputs", ()) if kind in output.get("data", {}))


def printed_by(cell: Any) -> str:
    """Return what a cell prints, and the words of what it shows in another form than a picture."""
    return "".join(
        output.get("text", "") or f"{output.data.get('text/plain', '')}\n"
        for output in cell.get("outputs", ())
        if output.output_type == "stream" or "image/svg+xml" not in output.get("data", {})
    )


def guesses(cells: Sequence[Any]) -> list[tuple[str, str]]:
    """Return the predictions and what was measured."""
    return [found for cell in cells for found in GUESS.findall(printed_by(cell))]


def first_that_fit(part: Part) -> list[Block]:
    """Return the first paragraph of a part, and the first cell of it that fits below, with what it prints."""
    for cell in part.cells:
        code = without_solutions(cell.source)
        if code and "check(" not in code and not is_import(code):
            said = printed_by(cell).strip("\n")
            blocks = [*part.text()[:1], code_block(code), *([code_block(said, "output")] if said else [])]
            if fits(*blocks):
                return blocks
    return part.text()


def stubs(part: Part) -> list[Block]:
    """Return the functions that the reader fills in."""
    written = [cell.source for cell in part.cells if re.search(r"^def ", cell.source, re.MULTILINE)]
    return [code_block(without_solutions(source)) for source in written[:1]]


def is_import(code: str) -> bool:
    """Return whether a cell imports names and does nothing else."""
    return all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in ast.parse(code).body)


def text_block(text: str) -> Block:
    """Return a paragraph, a list or a table of Markdown. A link keeps its words: another lesson is not in this file."""
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    reader = extra("markdown_it", "minidist lesson slides").MarkdownIt("commonmark", {"html": False}).enable("table")
    entries = re.sub(r"\n(?![-|*\d ]|    )", " ", text).splitlines()
    lines = sum(-(-len(entry) // TEXT_COLUMNS) for entry in entries)
    return Block(reader.render(text), lines * TEXT_LINE + GAP)


def code_block(text: str, kind: str = "code") -> Block:
    """Return code, or what it printed. A line that is too long for the screen is continued below."""
    lines = sum(max(1, -(-len(line) // CODE_COLUMNS)) for line in text.splitlines())
    return Block(f'<pre class="{kind}">{html.escape(text)}</pre>', lines * CODE_LINE + 2 * GAP)


def fits(*blocks: Block) -> bool:
    """Return whether the blocks fit on one slide."""
    return sum(block.height for block in blocks) <= ROOM


def together(heading: str, blocks: Sequence[Block]) -> Slide:
    """Return a slide with as many of the blocks, from the first on, as fit."""
    shown: list[Block] = []
    for block in blocks:
        if not fits(*shown, block):
            break
        shown.append(block)
    body, height = "".join(block.body for block in shown), sum(block.height for block in shown)
    if shown and "<pre" not in body:  # a short text is larger; a line then has fewer words, and the text more lines
        body = f'<div style="font-size: {min(140, int(100 * sqrt(ROOM / height)))}%">{body}</div>'
    return Slide(heading, body, height)


def page(slides: list[Slide]) -> str:
    """Return the slides as one page. Its security policy forbids the browser every request."""
    sections = "\n".join(
        f"<section><h2>{html.escape(slide.heading)}</h2>{slide.body}<footer>{number} / {len(slides)}</footer></section>"
        for number, slide in enumerate(slides, 1)
    )
    title = html.escape(slides[0].heading if slides else "minidist")
    return PAGE.replace("TITLE", title).replace("SECTIONS", sections)
