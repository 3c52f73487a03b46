"""A page for the instructor of a lesson: what is taken away, what goes wrong in the exercises, and exam questions.

    lesson ── its title, minutes, takeaway ──┐
    exercises ── what `check` recognises ────┼──▶ 04_all_reduce_without_a_boss.md
    exam.toml ── questions and answers ──────┘

Proved by: tests/lesson/test_instructor.py
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted_path
from minidist.base.read_file import read_toml
from minidist.course.lesson.exercise import Exercise
from minidist.course.lesson.grade import exercises_of
from minidist.course.lesson.numbers import number_of

METRICS = {"bytes": "bytes that a rank sends", "messages": "messages of a rank", "time": "virtual time"}


@cache
def exam() -> list[dict[str, Any]]:
    """Return the exam questions: {lesson, text, answer, and in some check, the expressions that prove the answer}."""
    path = Path(__file__).with_name("exam.toml")
    return list(read_toml(path, "the exam questions", "install minidist again")["question"])


def page(source: Path) -> str:
    """Return the page of a lesson's source file, in Markdown.

    Raises UsageError when the file has no title of a lesson.
    """
    number, text = number_of(source), source.read_text(encoding="utf-8")
    title = re.search(rf"^# # ({number} .*)$", text, re.MULTILINE)
    minutes = re.search(r"^# \*(\d+ minutes\..*)\*$", text, re.MULTILINE)
    if not title or not minutes:
        raise UsageError(
            f"{quoted_path(source)} has no line '# # {number} TITLE' with its minutes below; is it a lesson?"
        )

    parts = [f"# {title[1]}", f"{minutes[1]} The exercises, 5 to 10 of these minutes, may take longer."]
    if takeaway := re.search(r"^# ## \d+ Takeaway\n#\n(.*?)\n(?:\n|#\n# ## )", text, re.MULTILINE | re.DOTALL):
        parts.append("## What students take away\n\n" + re.sub(r"^# ?", "", takeaway[1], flags=re.MULTILINE))
    parts += [_exercise(exercise) for exercise in exercises_of(number)]
    if questions := [question for question in exam() if question["lesson"] == number]:
        parts.append("## Exam questions")
        parts += [f"{i}. {q['text']}\n\n   *Answer:* {q['answer']}" for i, q in enumerate(questions, 1)]
    return "\n\n".join(parts) + "\n"


def _exercise(exercise: Exercise) -> str:
    """Return what is judged in an exercise, and what `check` says to the mistakes that it recognises."""
    judged = ", ".join(METRICS.get(metric, metric) for metric in exercise.limits)
    limits = (
        f"Judged are the answers, and within par of our solution: {judged}." if judged else "Judged are the answers."
    )
    hints = "\n".join(f"- {hint.text}" for hint in exercise.hints)
    return f"## Exercise {exercise.name}\n\n{limits} What goes wrong, in the words with which `check` helps:\n\n{hints}"
