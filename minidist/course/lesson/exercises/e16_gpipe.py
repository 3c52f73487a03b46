"""Lessons 16 and 17: write a pipeline schedule as lists; minidist's own validator and simulated clock check them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.pipeline.plan import Plan
from minidist.course.lesson.exercise import Case, Exercise, drawing
from minidist.course.lesson.hint_file import hints_of
from minidist.course.lesson.plain import form
from minidist.pipeline.schedules import from_cells, get_schedule
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate


def plan_of(answer: Any, case: Case) -> Plan:
    """Return lists of "F0" and "B0" as a plan. Raises UsageError when they are not one, or wrong."""
    if not isinstance(answer, list | tuple) or len(answer) != case.size:
        raise UsageError(f"return one list for each of the {case.size} stages")
    for stage, row in enumerate(answer):
        if not isinstance(row, list | tuple):
            raise UsageError(f"what stage {stage} does is {form(row)}; return one list for each stage")
        if not row:
            raise UsageError(f"stage {stage} has no action; each stage runs each micro-batch forward and backward")
    for stage, row in enumerate(answer):
        for action in row:
            if not isinstance(action, str) or not re.fullmatch(r"[FBIW]\d{1,6}", action):
                raise UsageError(
                    f"{quoted(action)} of stage {stage} is not an action: write its kind and its micro-batch, as in"
                    " 'F0' or 'B3'"
                )
    plan = from_cells([[f"{stage}{action}" for action in row] for stage, row in enumerate(answer)], "yours")
    if plan.microbatches != case.seed:
        raise UsageError(f"there are micro-batches 0..{case.seed - 1}, and your lists go to {plan.microbatches - 1}")
    validate(Plan(plan.name, plan.orders, plan.stages, plan.microbatches))  # "flush", also when there are no backwards
    return plan


def in_the_readers_words(error: UsageError) -> str:
    """Return what a plan says about an action with its name as the reader wrote it: "F1 of stage 0" for "0F1"."""
    return re.sub(r"(?<!['\w])(\d+)([FBIW]\d+)\b", r"\2 of stage \1", str(error))


def as_good_as(name: str, lives: bool) -> Callable[[Case, Sequence[Any]], str]:
    """Return a check: as short as schedule `name`, and with `lives` no more micro-batches alive on any stage."""

    def check_answers(case: Case, answers: Sequence[Any]) -> str:
        try:
            plan = plan_of(answers[0], case)
        except UsageError as error:
            return f"not a plan: {in_the_readers_words(error)}"
        mine, best = time_plan(plan), time_plan(get_schedule(name).plan(case.size, case.seed))
        if mine.makespan > best.makespan:
            return f"it takes {mine.makespan:g}, {name} takes {best.makespan:g} (F takes 1, B takes 2)"
        for stage, (held, least) in enumerate(zip(mine.peak, best.peak, strict=True)):
            if lives and held > least:
                return f"stage {stage} holds {held} micro-batches at once; {least} are enough"
        return ""

    return check_answers


def cases() -> list[Case]:
    """Return the cases: the size is the number of stages, the seed the number of micro-batches."""
    return [Case(1, p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 7)]


def describe(case: Case) -> str:
    return f"{case.size} stage{'s' * (case.size != 1)}, {case.seed} micro-batch{'es' * (case.seed != 1)}"


def exercise(name: str, check_answers: Callable[[Case, Sequence[Any]], str], **more: Any) -> Exercise:
    """Return the exercise of a schedule. more: functions that only its hints need."""
    return Exercise(
        name=name,
        arguments=lambda case, rank: (case.size, case.seed),
        check_answers=check_answers,
        cases=cases,
        draw=drawing((1, 1), (1, 9), (1, 12)),
        par=Case(1, 4, 8),
        label=describe,
        communicates=False,
        written_by_hand=(
            "minidist.core.pipeline.plan",
            "minidist.core.pipeline.schedules",
            "minidist.pipeline.schedules",
        ),
        hints=hints_of(globals(), name, "schedules", **more),
    )


EXERCISES = [exercise("16.gpipe", as_good_as("gpipe", lives=False))]
