"""Lesson 09c: an all-reduce of what is kept.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.core.base.errors import DeadlockError, MismatchError
from minidist.course.lesson.exercise import Case, Exercise, Hint, reduced_to_all, returns


def mask_of(case: Case) -> np.ndarray:
    mask: np.ndarray = case.generator(99).random(case.size) < 0.3
    return mask


def gradients(case: Case) -> list[np.ndarray]:
    """Return whole numbers, some of them zero although their weight is kept."""
    return [case.generator(rank).integers(-3, 4, case.size) * 1.0 for rank in range(case.ranks)]


def sums(case: Case) -> np.ndarray:
    return np.sum(gradients(case), axis=0)


KEPT = Exercise(
    name="09c.kept_all_reduce",
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

EXERCISES = [KEPT]
