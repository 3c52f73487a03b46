"""The pages for instructors, and the exam questions: every number in an answer follows from a program or a formula."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from minidist import DeadlockError, SimWorld, all_reduce, reduce_scatter
from minidist.core.base.errors import UsageError
from minidist.course.lesson.instructor import exam, page
from minidist.course.lesson.numbers import number_of
from minidist.course.lesson.quiz import sent
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan

LESSONS = Path(__file__).parents[2] / "lessons"


def send_first(comm):
    comm.send(np.ones(3), (comm.rank + 1) % comm.size)
    comm.recv(np.empty(3), (comm.rank - 1) % comm.size)


def hangs(ranks, program, buffered):
    try:
        SimWorld(ranks, eager_bytes=1 << 20 if buffered else 0).run(program)
    except DeadlockError:
        return True
    return False


def timing(schedule, stages, microbatches):
    """The times of a plan whose F takes 1 and whose B takes 2."""
    return time_plan(get_schedule(schedule).plan(stages, microbatches))


def test_the_answers_of_exam_questions_follow_from_programs_and_formulas():
    names = (np, sent, all_reduce, reduce_scatter, hangs, send_first, timing)
    known = {"np" if name is np else name.__name__: name for name in names}
    checked = 0
    for question in exam():
        for expression in question.get("check", ()):
            # One dictionary, so that the functions inside of an expression see these names.
            assert eval(expression, known), expression
            checked += 1
    assert checked > 30


def test_every_core_lesson_has_three_questions():
    core = {number_of(path) for path in LESSONS.glob("[0-9][0-9]_*.py")}
    assert Counter(question["lesson"] for question in exam()) == dict.fromkeys(core, 3)


def test_every_page_has_the_takeaway_of_its_lesson_alone():
    for source in LESSONS.glob("[0-9]*.py"):
        takeaway = page(source).partition("## What students take away\n\n")[2].partition("\n\n")[0]
        assert takeaway.startswith("- "), source.name
        assert "\n#" not in takeaway, source.name


def test_a_page_has_the_takeaway_the_mistakes_and_the_questions(tmp_path, minidist):
    assert (
        "written: 2 pages"
        in minidist("lesson", "instructor", "04", "00b", "--folder", LESSONS, "-o", tmp_path / "pages").err
    )
    text = (tmp_path / "pages" / "04_all_reduce_without_a_boss.md").read_text()
    assert text.startswith("# 04 All-reduce without a root\n\n30 minutes. Before it: 00, 03. The exercises")
    takeaway, exercise, questions = text.split("\n## ")[1:]
    assert takeaway.startswith("What students take away\n\n- ")
    assert "\n#" not in takeaway
    assert exercise.startswith("Exercise 04.ring_all_reduce\n\nJudged are the answers, and within par")
    assert "- this is the mean of the ranks' arrays; the sum is asked for" in exercise
    assert questions.count("*Answer:*") == 3
    assert "56,000 B with a root" in questions

    (tmp_path / "04_other.py").write_text("# %%\n")
    with pytest.raises(UsageError, match="has no line '# # 04 TITLE'"):
        page(tmp_path / "04_other.py")
