"""Lesson 09d: a teacher on one group of ranks for the students of another."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.course.lesson.exercise import Case, Exercise, Least

CLASSES = 4


class Teacher:
    """`logits(j)` returns the teacher's logits, (rows, classes), for the rows of student j; on a student it raises."""

    def __init__(self, rank: int, logits: list[np.ndarray] | None) -> None:
        self.rank, self.logits = rank, logits

    def __call__(self, student: int) -> np.ndarray:
        if self.logits is None:
            raise UsageError(
                f"rank {self.rank} is a student and has no teacher's model; receive its soft targets from rank"
                " student % teachers"
            )
        return self.logits[student].copy()


def teachers_of(case: Case) -> int:
    """Return the number of teachers: about a third of the ranks."""
    return 1 + (case.ranks - 1) // 3


def logits_of(case: Case, student: int) -> np.ndarray:
    return case.generator(student, 7).standard_normal((case.size, CLASSES)) * 3


def soft(logits: np.ndarray, temperature: float) -> np.ndarray:
    scores: np.ndarray = np.exp(logits / temperature)
    return scores / scores.sum(axis=1, keepdims=True)


def targets_of(case: Case, of: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """Return every rank's answer, with of(logits) as the soft targets."""
    students = case.ranks - teachers_of(case)
    nothing = [np.zeros((0, CLASSES))] * teachers_of(case)
    return [*nothing, *(of(logits_of(case, student)) for student in range(students))]


TEMPERATURE = 2.0


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    teachers = teachers_of(case)
    logits = [logits_of(case, student) for student in range(case.ranks - teachers)] if rank < teachers else None
    return teachers, Teacher(rank, logits), case.size, TEMPERATURE


DISTIL = Exercise(
    name="09d.distil",
    arguments=arguments,
    expected=lambda case: targets_of(case, lambda logits: soft(logits, TEMPERATURE)),
    least=lambda case: Least(
        (case.ranks - teachers_of(case)) * (case.size > 0),
        8 * (case.ranks - teachers_of(case)) * case.size * (CLASSES - 1),
    ),
    par=Case(7, 3),
    limits=("bytes", "messages"),
    unit="row",
    for_hints={
        "without_temperature": lambda f: f.answers_are(targets_of(f.case, lambda logits: soft(logits, 1.0))),
        "multiplied_by_temperature": lambda case: targets_of(case, lambda logits: soft(logits, 1 / TEMPERATURE)),
        "over_the_wrong_axis": lambda case: targets_of(case, lambda logits: soft(logits.T, TEMPERATURE).T),
        "uniform": lambda case: targets_of(case, lambda logits: np.full(logits.shape, 1 / CLASSES)),
        "not_normalised": lambda case: targets_of(case, lambda logits: np.exp(logits / TEMPERATURE)),
        "logits": lambda f: f.answers_are(targets_of(f.case, lambda logits: logits)),
    },
)

EXERCISES = [DISTIL]
