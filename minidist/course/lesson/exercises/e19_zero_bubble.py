"""Lesson 19: beat 1F1B's time within its memory, by splitting the backward in two."""

from collections.abc import Sequence
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.course.lesson.exercise import Case
from minidist.course.lesson.exercises.e16_gpipe import exercise, in_the_readers_words, plan_of
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    """Check that it is as short as ZB-H1, with nowhere more alive than on 1F1B's fullest stage."""
    try:
        plan = plan_of(answers[0], case)
    except UsageError as error:
        return f"not a plan: {in_the_readers_words(error)}"
    mine, par = time_plan(plan), time_plan(get_schedule("zb-h1").plan(case.size, case.seed))
    old = time_plan(get_schedule("1f1b").plan(case.size, case.seed))
    for stage, held in enumerate(mine.peak):
        if held > max(old.peak):
            return f"stage {stage} holds {held} micro-batches at once; 1F1B's fullest stage holds {max(old.peak)}"
    if mine.makespan > par.makespan:
        return (
            f"it takes {mine.makespan:g}, {par.makespan:g} is possible and 1F1B takes {old.makespan:g} (F, I and W take"
            " 1 each)"
        )
    return ""


EXERCISES = [
    exercise("19.zero_bubble", check_answers, w_comes_before=lambda f: "before" in f.message and "W" in f.message)
]
