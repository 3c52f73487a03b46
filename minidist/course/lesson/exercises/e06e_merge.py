"""Lesson 06e: a fragment of Streaming DiLoCo has arrived, while the replica trained on.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise
from minidist.course.lesson.hint_file import hints_of

LR, ALPHA = 0.5, 0.25


def data(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the common weights, each rank's own ones (ranks, size), and the outer gradient, in whole numbers."""
    draw = case.generator()
    common, gradient = draw.integers(-9, 10, (2, case.size)) * 8.0
    return common, draw.integers(-9, 10, (case.ranks, case.size)) * 8.0, gradient


def merged(case: Case, kind: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what the rule gives on every rank, or what a typical mistake does."""
    common, own, gradient = data(case)
    new = common - LR * gradient
    target = common if kind == "old" else own - LR * gradient if kind == "own" else new
    alpha = 1 - ALPHA if kind == "swapped" else ALPHA
    result = alpha * own + (1 - alpha) * target
    return [(new, each) for each in result]


EXERCISES = [
    Exercise(
        name="06e.merge",
        arguments=lambda case, rank: (data(case)[0], data(case)[1][rank], data(case)[2], LR, ALPHA),
        expected=merged,
        par=Case(3, 8),
        limits=("bytes",),
        hints=hints_of(globals(), "06e.merge"),
    )
]
