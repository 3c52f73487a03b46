"""Lesson 06d: the residuals of error feedback in a checkpoint that another number of ranks loads.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.course.lesson.exercise import Case, Exercise, Failure, difference, drawing
from minidist.course.lesson.hint_file import hints_of

LENGTH = 3  # numbers of a residual


class Reader:
    """`read(i)` returns the residual that old rank i saved, and records that it was read."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.taken = rows, []  # type: ignore[var-annotated]

    def __call__(self, old: int) -> np.ndarray:
        if not 0 <= old < len(self.rows):
            raise UsageError(
                f"there is no saved residual {old}; the checkpoint was made by {len(self.rows)} ranks, 0 to"
                f" {len(self.rows) - 1}"
            )
        self.taken.append(old)
        return self.rows[old].copy()


def saved(case: Case) -> np.ndarray:
    """Return (old ranks, LENGTH) whole numbers, so that sums in any order are equal."""
    return case.generator().integers(-99, 100, (case.size, LENGTH)) * 1.0


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    rows = saved(case)
    for rank, (residual, _) in enumerate(answers):
        if residual is None or np.shape(residual) != (LENGTH,):
            return (
                f"rank {rank} returned {'None' if residual is None else f'an array of shape {np.shape(residual)}'}; a"
                f" residual has {LENGTH} numbers"
            )

    # Nothing may be lost or counted twice: the sum over the ranks stays the same.
    total, wanted = np.sum([residual for residual, _ in answers], axis=0), rows.sum(axis=0)
    if not np.array_equal(total, wanted):
        return (
            f"the residuals of all {case.ranks} ranks add up to {total.tolist()}; those saved by {case.size} ranks to"
            f" {wanted.tolist()}"
        )

    # On as many ranks as before each gets its own back.
    if case.size == case.ranks:
        for rank, (residual, _) in enumerate(answers):
            if not np.array_equal(residual, rows[rank]):
                return (
                    f"rank {rank} of as many ranks as before: {difference(residual, rows[rank], 0)}, its own saved one"
                )

    most = -(-case.size // case.ranks)
    for rank, (_, taken) in enumerate(answers):
        if len(taken) > most:
            return (
                f"the sum is right, but rank {rank} read {len(taken)} of {case.size} saved residuals; {most} would do"
            )
    return ""


def totals(failure: Failure) -> tuple[np.ndarray, np.ndarray]:
    """Return (what the ranks have together, what they should have)."""
    return np.sum([residual for residual, _ in failure.answers], axis=0), saved(failure.case).sum(axis=0)


def adds_up(failure: Failure) -> bool:
    return "add up to" in failure.message


EXERCISES = [
    Exercise(
        name="06d.load_residual",
        arguments=lambda case, rank: (case.size, Reader(saved(case)), LENGTH),
        answer=lambda arguments, returned: (returned, arguments[1].taken),
        check_answers=check_answers,
        par=Case(3, 8),
        unit="saved residual",
        draw=drawing((1, 9), (0, 30)),
        cases=lambda: sorted(
            [Case(ranks, size) for ranks in (1, 2, 3, 4, 5, 8) for size in (1, 2, 3, 4, 7, 8)]
            + [Case(3, 0), Case(6, 11, 1), Case(7, 23, 2)]
        ),
        limits=("messages",),
        hints=hints_of(
            globals(),
            "06d.load_residual",
            nothing_arrives=lambda f: adds_up(f) and (not totals(f)[0].any()),
            summed_and_sent_again=lambda f: adds_up(f) and np.array_equal(totals(f)[0], totals(f)[1] * f.case.ranks),
            never_sent=lambda f: (
                adds_up(f)
                and f.case.size > f.case.ranks
                and (len({old for _, taken in f.answers for old in taken}) < f.case.size)
            ),
        ),
    )
]
