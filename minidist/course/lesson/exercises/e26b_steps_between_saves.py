"""Lesson 26b: after how many steps should a job save?"""

from collections.abc import Sequence
from typing import Any

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing


def problem(case: Case) -> tuple[int, float, float, float]:
    """Return the number of cards, and in hours: between two failures of one, of a save, and of a step."""
    draw = case.generator()
    return case.size, float(draw.uniform(5e3, 5e4)), float(draw.uniform(0.01, 0.2)), float(draw.uniform(0.002, 2))


def cost(case: Case, steps: int) -> float:
    """Return the hours that are lost per hour of work."""
    cards, mtbf, save, step = problem(case)
    interval = steps * step
    return save / interval + interval / (2 * mtbf / cards)


def least(case: Case) -> int:
    """Return the smallest number of steps that costs the least."""
    steps = 1
    while cost(case, steps + 1) < cost(case, steps):
        steps += 1
    return steps


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    steps, best = int(answers[0]), least(case)
    if steps < 1 or steps != answers[0]:
        return f"the answer is {answers[0]!r}; return a number of steps, at least 1"
    if cost(case, steps) > cost(case, best) * (1 + 1e-9):
        return (
            f"with a save every {steps} steps {cost(case, steps):.4f} hours are lost per hour of work, and with one"
            f" every {best} steps {cost(case, best):.4f}"
        )
    return ""


def describe(case: Case) -> str:
    cards, mtbf, save, step = problem(case)
    return (
        f"{cards} card{'s' * (cards != 1)}, one fails in {mtbf:,.0f} h; a save of {save:.3f} h, steps of {step:.3f} h"
    )


def of_one_card(failure: Failure) -> bool:
    """Return whether the answer is right for a job on one card."""
    cards, mtbf, save, step = problem(failure.case)
    return cards > 1 and abs(failure.answers[0] - (2 * save * mtbf) ** 0.5 / step) <= 1


EXERCISES = [
    Exercise(
        name="26b.steps_between_saves",
        arguments=lambda case, rank: problem(case),
        check_answers=check_answers,
        cases=lambda: [Case(1, cards, seed) for cards in (1, 8, 64, 1000, 16384) for seed in range(8)],
        draw=drawing((1, 1), (1, 20000)),
        par=Case(1, 1000),
        label=describe,
        communicates=False,
        for_hints={
            "rounded": lambda f: abs(f.answers[0] - least(f.case)) == 1,
            "none_at_all": lambda f: f.answers[0] < 1,
        },
    )
]
