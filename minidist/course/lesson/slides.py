"""A deck of slides of a lesson: one HTML file that needs no other file and no network.

    lesson ── build.make: runs every cell now ──▶ notebook with outputs ──▶ slides: text, code with its output, pictures

The numbers and the pictures are those of the traces of this run. Solutions are left out. In a browser the arrow keys
turn the pages; printing gives one page per slide.

Proved by: tests/lesson/test_slides.py
"""

import base64
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.base.extras import extra
from minidist.course.lesson.build import make

MAX_BLOCKS = 4  # paragraphs, lists and tables of one slide
MAX_LINES = 34  # lines of code and output of one slide
LEFT_OUT = re.compile(r"\b(solution|reveal)\(|^(import|from) ")  # our solutions, and cells of imports


@dataclass(frozen=True)
class Slide:
    """One slide: its heading as text, and its body as HTML."""

    heading: str
    body: str


def deck(sources: list[Path]) -> str:
    """Run the lessons and return their slides as one HTML page.

    Raises UsageError where the packages that run a notebook are missing, LessonError when a cell fails.
    """
    extra("markdown_it", "minidist lesson slides")  # before minutes of lessons
    notebooks = [make(source) for source in sources]
    return page([slide for notebook in notebooks for slide in slides_of(notebook)])


def slides_of(notebook: Any) -> Iterator[Slide]:
    """Yield the slides of a notebook that has its outputs."""
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for text in re.split(r"^(?=#{1,2} )", cell.source, flags=re.MULTILINE):
                found = re.match(r"#{1,2} (.*)\n?", text)
                heading = found[1] if found else heading
                yield from text_slides(heading, text[found.end() :] if found else text, is_title=text.startswith("# "))
        elif cell.cell_type == "code":
            yield from code_slides(heading, cell)


def text_slides(heading: str, text: str, is_title: bool = False) -> Iterator[Slide]:
    """Yield the slides of a text: a few paragraphs each. A title has a slide even without text."""
    # A link leads to another lesson, which is not in this file: its words stay.
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n(?=\S)", text.strip())
    reader = extra("markdown_it", "minidist lesson slides").MarkdownIt("commonmark", {"html": False}).enable("table")
    for start in range(0, len(blocks), MAX_BLOCKS):
        body = reader.render("\n\n".join(blocks[start : start + MAX_BLOCKS]))
        if body.strip() or is_title:
            yield Slide(heading, body)


def code_slides(heading: str, cell: Any) -> Iterator[Slide]:
    """Yield a slide with the code and what it prints, cut where it is long, and one for each picture."""
    if LEFT_OUT.search(cell.source):
        return
    printed, pictures = "", []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            pictures.append((data["image/svg+xml"], data.get("text/plain", "")))
        else:
            printed += output.get("text", "") or data.get("text/plain", "")
    yield from listing(heading, cell.source, "code")
    yield from listing(heading, printed, "output")
    for svg, words in pictures:
        encoded = base64.b64encode(svg.encode()).decode()
        yield Slide(heading, f'<img alt="{html.escape(words)}" src="data:image/svg+xml;base64,{encoded}">')


def listing(heading: str, text: str, kind: str) -> Iterator[Slide]:
    """Yield slides with the lines of a text, at most MAX_LINES each."""
    lines = text.rstrip().splitlines()
    for start in range(0, len(lines), MAX_LINES):
        part = html.escape("\n".join(lines[start : start + MAX_LINES]))
        yield Slide(heading, f'<pre class="{kind}">{part}</pre>')


def page(slides: list[Slide]) -> str:
    """Return the slides as one page. Its security policy forbids the browser every request."""
    sections = "\n".join(
        f"<section><h2>{html.escape(slide.heading)}</h2>{slide.body}<footer>{number} / {len(slides)}</footer></section>"
        for number, slide in enumerate(slides, 1)
    )
    title = html.escape(slides[0].heading if slides else "minidist")
    return PAGE.replace("TITLE", title).replace("SECTIONS", sections)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>TITLE</title>
<style>
body { margin: 0; font: 2.6vmin/1.4 sans-serif; color: #222; background: #fff; }
section { display: none; box-sizing: border-box; width: 100vw; height: 100vh; padding: 4vmin 8vmin; overflow: auto; }
section.shown { display: block; }
h2 { color: #4477AA; font-size: 4.4vmin; margin: 0 0 3vmin; }
pre { font: 2vmin/1.25 monospace; padding: 2vmin; background: #F0F0F0; white-space: pre-wrap; }
pre.output { background: #fff; border-left: 0.6vmin solid #228833; }
img { display: block; margin: auto; max-width: 100%; max-height: 78vh; }
table { border-collapse: collapse; } td, th { border: 1px solid #aaa; padding: 0.6vmin 1.5vmin; text-align: left; }
footer { position: absolute; right: 3vmin; bottom: 2vmin; color: #777; font-size: 2vmin; }
@media print { section { display: block; position: relative; page-break-after: always; } }
</style>
</head>
<body>
SECTIONS
<script>
const slides = [...document.querySelectorAll("section")];
let at = Math.min(Math.max(parseInt(location.hash.slice(1)) || 1, 1), slides.length);
function show(number) {
  at = Math.min(Math.max(number, 1), slides.length);
  slides.forEach((slide, i) => slide.classList.toggle("shown", i + 1 === at));
  history.replaceState(null, "", "#" + at);
}
addEventListener("keydown", event => {
  if (["ArrowRight", "PageDown", " "].includes(event.key)) show(at + 1);
  if (["ArrowLeft", "PageUp"].includes(event.key)) show(at - 1);
  if (event.key === "Home") show(1);
  if (event.key === "End") show(slides.length);
});
show(at);
</script>
</body>
</html>
"""
