"""A deck has the text of a lesson, the numbers and pictures of its run, no solution, and needs no network."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest

from minidist.commands.lesson import lesson_slides
from minidist.core.base.errors import UsageError
from minidist.course.lesson import slides

ROOT = Path(__file__).resolve().parents[2]


@cache
def notebook():
    return nbformat.read(ROOT / "lessons" / "04b_order_of_additions.ipynb", as_version=4)


def deck_of_04b():
    return slides.page(list(slides.slides_of(notebook())))


def test_a_deck_has_every_part_of_a_lesson_and_its_pictures_with_their_words():
    text = deck_of_04b()
    for part in range(1, 11):
        assert f"<h2>{part} " in text
    assert "<h2>04b The order of additions</h2>" in text
    pictures = [
        output["data"]
        for cell in notebook().cells
        for output in cell.get("outputs", ())
        if "image/svg+xml" in str(output)
    ]
    alts = re.findall(r'<img alt="([^"]+)" src="data:image/svg', text)
    assert len(alts) == len(pictures) > 0


def test_a_deck_asks_no_other_machine_for_anything():
    text = deck_of_04b()
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_a_deck_shows_no_solution():
    assert "def ordered_reduce_scatter(comm: Comm" in str(notebook())
    assert "def ordered_reduce_scatter(comm: Comm" not in deck_of_04b()
    assert "def ordered_reduce_scatter(comm, array)" in deck_of_04b()  # the stub


def test_no_slide_is_longer_than_a_screen():
    for slide in slides.slides_of(notebook()):
        assert slide.body.count("\n") <= slides.MAX_LINES + 2


def test_the_numbers_are_those_of_the_run_of_the_command(tmp_path):
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    (lessons / "90_tiny.py").write_text(
        """# %% [markdown]
# # 90 <Tiny>
# ## 1 The case
# Text & more, see [another](91_other.ipynb).

# %%
from minidist.comm import SimWorld

# %%
world = SimWorld(2)
world.run(lambda comm: comm.barrier())
print(sum(len(trace.sent()) for trace in world.traces) * 1000 + 7)
"""
    )
    command = [sys.executable, "-m", "minidist", "lesson", "slides", "90", "-o", "deck.html", "--folder", "lessons"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
