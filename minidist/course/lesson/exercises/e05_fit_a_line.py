"""Lesson 05: latency and bandwidth from noisy measurements over six decades of message sizes.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing
from minidist.course.lesson.hint_file import hints_of


def truth(case: Case) -> tuple[float, float]:
    draw = case.generator(1)
    return 10 ** draw.uniform(-6.5, -4.5), 10 ** draw.uniform(-10, -8.5)


def measurements(case: Case) -> tuple[list[float], list[float]]:
    """Return sizes over six decades and seconds with 3 % of noise, every third one disturbed."""
    alpha, beta = truth(case)
    draw = case.generator(2)
    sizes = np.logspace(0.9, 7, case.size).round()
    seconds = (alpha + beta * sizes) * (1 + 0.03 * draw.standard_normal(case.size))
    seconds[2::3] *= 2
    return sizes.tolist(), seconds.tolist()


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    if not isinstance(answers[0], list | tuple | np.ndarray) or len(answers[0]) != 2:
        return "return (alpha, beta)"
    for name, got, wanted in zip(("alpha", "beta"), answers[0], truth(case), strict=True):
        if not abs(got - wanted) <= 0.08 * wanted:
            return f"{name} is {got:.3g}, the machine's is {wanted:.3g}"
    return ""


def swapped(failure: Failure) -> bool:
    pair = failure.answers[0] if failure.answers else None
    alpha, beta = truth(failure.case)
    return isinstance(pair, list | tuple | np.ndarray) and bool(np.allclose(pair, (beta, alpha), rtol=0.5, atol=0))


EXERCISES = [
    Exercise(
        name="05.fit_a_line",
        arguments=lambda case, rank: measurements(case),
        check_answers=check_answers,
        cases=lambda: [Case(1, 20, seed) for seed in range(12)],
        draw=drawing((1, 1), (20, 20)),
        par=Case(1, 20),
        label=lambda case: f"machine {case.seed}, {case.size} message sizes",
        communicates=False,
        hints=hints_of(
            globals(),
            "05.fit_a_line",
            a_little_off=lambda f: 0.1 < f.answers[0][1] < 10,
            far_off=lambda f: f.answers[0][1] > 1000.0,
        ),
    )
]
