"""The booklet has a spread for each lesson of the core, and each page fits on a sheet."""

import re

import pytest

from minidist.course.lesson import booklet
from minidist.course.lesson.numbers import number_of
from minidist.course.lesson.slides import Block
from tests.lesson.test_lessons import LESSONS, ROOT
from tests.report.browser import look, run

FILLED = """<script>
window.extra = Promise.resolve([...document.querySelectorAll("section")].map(page => {
  const box = page.getBoundingClientRect();
  return Math.max(...[...page.children].map(child => child.getBoundingClientRect().bottom - box.top)) / box.height;
}));
</script>"""


@pytest.fixture(scope="module")
def text():
    return booklet.booklet(ROOT / "lessons")


def test_each_core_lesson_has_two_pages_and_a_picture(text):
    pages = re.findall(r"<section>(.*?)</section>", text, re.DOTALL)
    core = [path for path in LESSONS if number_of(path).isdecimal()]
    assert len(pages) == 2 * len(core) == 36
    for path, left, right in zip(core, pages[::2], pages[1::2], strict=True):
        assert f"<h1>{number_of(path)} " in left
        assert "<img" in left
        assert all(f"<h2>{part}</h2>" in right for part in ("The idea", "Measured", "Break it", "Takeaway"))
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)


def test_a_page_leaves_out_what_does_not_fit():
    high, low = Block("<p>high</p>", booklet.PAGE_ROOM), Block("<p>low</p>", 1.0)
    assert booklet.page([low, high, low]) == "<section><p>low</p><p>low</p></section>"


def test_in_a_browser_each_page_fits_on_a_sheet(text, tmp_path):
    page = tmp_path / "booklet.html"
    page.write_text(text.replace("style-src", "script-src 'unsafe-inline'; style-src"))
    facts, _ = look(page, tmp_path, FILLED, size="900,1200")
    assert len(facts["extra"]) == 36
    assert max(facts["extra"]) < 1
    run(tmp_path, f"--print-to-pdf={tmp_path / 'booklet.pdf'}", page.as_uri())
    assert len(re.findall(rb"/Type /Page\b", (tmp_path / "booklet.pdf").read_bytes())) == 36
