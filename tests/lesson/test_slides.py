"""A deck has what a lecture shows of a lesson, each slide fits on a screen, no solution, and it needs no network."""

import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

from minidist.commands.lesson import lesson_slides
from minidist.core.base.errors import UsageError
from minidist.course.lesson import slides
from minidist.course.lesson.build import sources
from minidist.course.lesson.numbers import number_of
from tests.cases import each
from tests.report.browser import look

ROOT = Path(__file__).resolve().parents[2]


LESSONS = sources(ROOT / "lessons")


@cache
def notebook(number):
    (path,) = (path for path in LESSONS if path.name.startswith(f"{number}_"))
    return nbformat.read(path.with_suffix(".ipynb"), as_version=4)


def deck_of_04b():
    return slides.page(slides.slides_of(notebook("04b")))


@each("source", LESSONS, ids=lambda source: source.stem)
def test_a_lesson_has_8_to_13_slides_and_each_fits_on_a_screen(source):
    made = slides.slides_of(notebook(number_of(source)))
    assert 8 <= len(made) <= 13
    assert [slide.heading for slide in made if slide.height > slides.ROOM] == []
    headings = [slide.heading for slide in made]
    assert headings[1] == "Predict"
    assert {"The code", "Predicted and measured", "Break it", "Takeaway"} <= set(headings)
    assert sum("<img" in slide.body for slide in made) >= 1
    body = "".join(slide.body for slide in made)
    assert "solution(" not in body
    assert "reveal(" not in body


TOO_HIGH = """<script>
window.extra = Promise.resolve(slides.map((slide, i) => {
  show(i + 1);
  const parts = [...slide.children].filter(child => child.tagName !== "FOOTER");
  const bottom = Math.max(...parts.map(child => child.getBoundingClientRect().bottom));
  return bottom > innerHeight || slide.scrollWidth > slide.clientWidth ? slide.innerText : "";
}).filter(text => text));
</script>"""


def test_in_a_browser_every_slide_fits(tmp_path):
    numbers = [number_of(source) for source in LESSONS]
    made = [slide for number in numbers for slide in slides.slides_of(notebook(number))]
    more = "x\n" * 40
    page = tmp_path / "deck.html"
    page.write_text(slides.page([*made, slides.Slide("high", f"<pre>{more}</pre>"), slides.Slide("low", "x")]))
    facts, console = look(page, tmp_path, TOO_HIGH, size="1280,720")
    # The browser says that it slows down a page that goes through hundreds of slides at once.
    assert [line for line in console if "Throttling navigation" not in line] == []
    assert [text.split()[0] for text in facts["extra"]] == ["high"]


def test_a_line_that_is_too_long_for_a_screen_counts_as_several():
    once, twice = (slides.code_block("x" * columns) for columns in (100, 101))
    assert twice.height - once.height == pytest.approx(slides.CODE_LINE)
    assert slides.text_block("word " * 40).height == pytest.approx(3 * slides.TEXT_LINE + slides.GAP)
    rows = slides.text_block("| a | b |\n|---|---|\n| 1 | 2 |")
    assert "<table>" in rows.body
    assert rows.height == pytest.approx(3 * slides.TEXT_LINE + slides.GAP)


def test_what_does_not_fit_is_left_out():
    lines = slides.code_block("\n".join("x" * 20))
    assert slides.fits(lines)
    assert slides.together("a", [lines, lines]) == slides.Slide("a", lines.body, lines.height)


def test_a_deck_shows_the_pictures_with_their_words_the_stepper_and_what_was_measured():
    text = slides.page(slides.slides_of(notebook("04")))
    words = [data["text/plain"] for data in slides.outputs(notebook("04").cells, "image/svg+xml")]
    assert re.findall(r'<img alt="([^"]+)" src="data:image/svg', text) == words[:2]
    assert text.count("<iframe srcdoc=") == 1
    assert "<strong>56,000 B</strong>" in text
    assert "<h2>04 All-reduce without a root</h2>" in text


def test_a_deck_asks_no_other_machine_for_anything():
    text = deck_of_04b()
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_a_deck_shows_the_stub_and_no_solution():
    assert "def ordered_reduce_scatter(comm, array)" in deck_of_04b()
    assert "correct on" not in deck_of_04b()


def test_the_numbers_are_those_of_the_run_of_the_command(tmp_path, monkeypatch, minidist):
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    (lessons / "90_tiny.py").write_text(
        """# %% [markdown]
# # 90 <Tiny>
# ## 1 The case
# Text & more, see [another](91_other.ipynb).

# %%
from minidist.comm import SimWorld

# %% [markdown]
# ## 5 Check

# %%
world = SimWorld(2)
world.run(lambda comm: comm.barrier())
print(sum(len(trace.sent()) for trace in world.traces) * 1000 + 7)
"""
    )
    monkeypatch.chdir(tmp_path)
    minidist("lesson", "slides", "90", "-o", "deck.html", "--folder", "lessons")
    text = (tmp_path / "deck.html").read_text()
    assert re.search(r'<pre class="output">\d+007</pre>', text)
    assert "<h2>90 &lt;Tiny&gt;</h2>" in text
    assert "Text &amp; more, see another." in text
    assert "import SimWorld" not in text


def test_other_files_and_unknown_lessons_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"end it in \.html"):
        lesson_slides(["04"], tmp_path / "deck.pdf", ROOT / "lessons")
    with pytest.raises(UsageError, match="no lesson 99"):
        lesson_slides(["99"], tmp_path / "deck.html", ROOT / "lessons")
