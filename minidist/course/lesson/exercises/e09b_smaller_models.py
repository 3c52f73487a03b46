"""Lesson 09b: one grid for all ranks, an all-reduce of what is kept, and a teacher on one group of ranks for another.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.base.errors import DeadlockError, MismatchError, UsageError
from minidist.course.lesson.exercise import Case, Exercise, Failure, Hint, Least, is_wrong, reduced_to_all, returns

# --- 09b.one_grid -----------------------------------------------------------------------------------------------------


def shards(case: Case) -> list[np.ndarray]:
    """Return the values of each rank: later ranks have fewer, some none, and each has a range of its own."""
    sizes = [max(0, case.size - rank) for rank in range(case.ranks)]
    some = float(case.seed % 4 != 1)  # else all of them are zero
    return [some * (case.generator(rank).standard_normal(n) * 2.0**-rank - rank) for rank, n in enumerate(sizes)]


def rounded(x: np.ndarray, largest: float, to_whole: Callable[[np.ndarray], np.ndarray] = np.round) -> np.ndarray:
    scale = largest / 127 or 1.0
    return np.clip(to_whole(x / scale), -127, 127) * scale


def not_to_nearest(failure: Failure) -> bool:
    mine = shards(failure.case)
    largest = max(map(magnitude, mine))
    ways = (np.floor, np.trunc, np.ceil)
    return any(failure.answers_are([rounded(x, largest, way) for x in mine]) for way in ways)


def with_largest(failure: Failure, largest: Callable[[list[np.ndarray], int], float]) -> bool:
    """Return whether each rank rounded to a grid that ends at largest(all shards, its number)."""
    mine = shards(failure.case)
    return failure.answers_are([rounded(x, largest(mine, rank)) for rank, x in enumerate(mine)])


def magnitude(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


ONE_GRID = Exercise(
    name="09b.one_grid",
    arguments=lambda case, rank: (shards(case)[rank],),
    expected=lambda case: [rounded(x, max(map(magnitude, shards(case)))) for x in shards(case)],
    least=lambda case: Least(2 * (min(case.ranks, case.size) - 1), 8 * 2 * (min(case.ranks, case.size) - 1)),
    par=Case(4, 16),
    limits=("bytes",),
    unit="value",
    hints=(
        Hint(
            lambda f: with_largest(f, lambda mine, rank: magnitude(mine[rank])),
            "this is a grid of this rank's own values: the others round to another one; agree on the largest first",
        ),
        Hint(
            lambda f: with_largest(f, lambda mine, rank: sum(map(magnitude, mine))),
            "the sum of the ranks' largest values is no value of any rank: reduce with 'max'",
        ),
        Hint(
            lambda f: with_largest(f, lambda mine, rank: max(float(x.max(initial=-np.inf)) for x in mine)),
            "the most negative value may have the largest magnitude: take np.abs before the maximum",
        ),
        Hint(
            lambda f: with_largest(f, lambda mine, rank: sum(map(magnitude, mine)) / len(mine)),
            "the mean of the ranks' largest values is too small for some of them: reduce with 'max'",
        ),
        Hint(
            not_to_nearest,
            "each value goes to the nearest level, np.round; to round down, or towards 0, moves all values one way",
        ),
        returns(
            lambda case: [
                rounded(x, max(map(magnitude, shards(case)))) * 127 / (max(map(magnitude, shards(case))) or 127.0)
                for x in shards(case)
            ],
            "these are the levels, whole numbers: times the scale they are the values again",
        ),
        Hint(
            is_wrong,
            "every value is rounded to the nearest of the levels -127 to 127 times largest / 127, with the largest"
            " magnitude of all ranks",
        ),
        Hint(
            lambda f: (
                f.raised(ValueError, ZeroDivisionError, FloatingPointError)
                or (is_wrong(f) and any(not np.isfinite(a).all() for a in f.answers))
            ),
            "a rank without values still takes part (np.max has `initial=`), and where all values are zero so is the"
            " scale, by which nothing can be divided; halves are rounded by np.round",
        ),
        Hint(lambda f: f.kind == "limit", "right, but too many bytes: of all values only the largest matters"),
    ),
)

# --- 09b.kept_all_reduce ----------------------------------------------------------------------------------------------


def mask_of(case: Case) -> np.ndarray:
    mask: np.ndarray = case.generator(99).random(case.size) < 0.3
    return mask


def gradients(case: Case) -> list[np.ndarray]:
    """Return whole numbers, some of them zero although their weight is kept."""
    return [case.generator(rank).integers(-3, 4, case.size) * 1.0 for rank in range(case.ranks)]


def sums(case: Case) -> np.ndarray:
    return np.sum(gradients(case), axis=0)


KEPT = Exercise(
    name="09b.kept_all_reduce",
    arguments=lambda case, rank: (gradients(case)[rank], mask_of(case)),
    expected=lambda case: [np.where(mask_of(case), sums(case), 0.0)] * case.ranks,
    least=reduced_to_all(lambda case: int(mask_of(case).sum())),
    par=Case(4, 40),
    limits=("bytes",),
    unit="weight",
    hints=(
        Hint(
            lambda f: f.kind == "limit",
            "right, but what is pruned travels too, or the places of what is kept; the mask is the same on every rank,"
            " so only the kept values need to be sent",
        ),
        Hint(
            lambda f: f.raised(MismatchError, DeadlockError),
            "the ranks sent arrays of different lengths: choose by the mask, which all have, not by the gradient, whose"
            " zeros differ",
        ),
        Hint(
            lambda f: f.answers_are([sums(f.case)[mask_of(f.case)]] * f.case.ranks),
            "these are the kept entries alone: put them back into their places in an array of zeros",
        ),
        Hint(
            lambda f: f.answers_are([np.where(mask_of(f.case), sums(f.case), g) for g in gradients(f.case)]),
            "what is pruned keeps this rank's own gradient; it must be zero, or the replicas drift apart",
        ),
        Hint(
            lambda f: any(
                f.answers_are([np.where(mask_of(f.case), reduced(gradients(f.case), axis=0), 0.0)] * f.case.ranks)
                for reduced in (np.mean, np.max)
            ),
            "the ranks' entries are averaged, or the largest of them is taken; their sum is asked for",
        ),
        returns(
            lambda case: [np.where(mask_of(case), g, sums(case)) for g in gradients(case)],
            "the mask is True where a weight is kept, and these are the sums of those that are pruned",
        ),
        Hint(
            lambda f: any(
                f.answers_are([times * g * mask_of(f.case) for g in gradients(f.case)]) for times in (1, f.case.ranks)
            ),
            "this is this rank's own gradient: take the kept entries, sum them over all ranks, put them back",
        ),
    ),
)

# --- 09b.distil -------------------------------------------------------------------------------------------------------

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
    name="09b.distil",
    arguments=arguments,
    expected=lambda case: targets_of(case, lambda logits: soft(logits, TEMPERATURE)),
    least=lambda case: Least(
        (case.ranks - teachers_of(case)) * (case.size > 0),
        8 * (case.ranks - teachers_of(case)) * case.size * (CLASSES - 1),
    ),
    par=Case(7, 3),
    limits=("bytes", "messages"),
    unit="row",
    hints=(
        Hint(
            lambda f: f.answers_are(targets_of(f.case, lambda logits: soft(logits, 1.0))),
            "these are the teacher's probabilities at temperature 1: divide the logits by the temperature before exp",
        ),
        returns(
            lambda case: targets_of(case, lambda logits: soft(logits, 1 / TEMPERATURE)),
            "the logits are multiplied by the temperature, which makes the targets harder: divide them by it",
        ),
        returns(
            lambda case: targets_of(case, lambda logits: soft(logits.T, TEMPERATURE).T),
            "these are not the probabilities of rows: a softmax runs over the classes, axis=1",
        ),
        returns(
            lambda case: targets_of(case, lambda logits: np.exp(logits / TEMPERATURE)),
            "these are exponentials: divide those of a row by their sum, so that they add up to 1",
        ),
        Hint(
            lambda f: f.answers_are(targets_of(f.case, lambda logits: logits)),
            "these are logits: a student learns from probabilities, softmax(logits / temperature) of each row",
        ),
        Hint(
            lambda f: f.kind == "limit",
            "right, but one rank sends more than its share: student j belongs to teacher j % teachers, and nobody else"
            " needs its targets",
        ),
        Hint(
            lambda f: f.raised(DeadlockError),
            "who sends to whom must be said in the same way on both sides: student j is rank teachers + j, its teacher"
            " is rank j % teachers",
        ),
        Hint(lambda f: f.raised(UsageError), "only teachers have the model: receive, do not compute, on a student"),
    ),
)

EXERCISES = [ONE_GRID, KEPT, DISTIL]
