"""Lesson 09c: an all-reduce of what is kept."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, reduced_to_all


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
    for_hints={
        "only_what_is_kept": lambda f: f.answers_are([sums(f.case)[mask_of(f.case)]] * f.case.ranks),
        "own_elsewhere": lambda f: f.answers_are(
            [np.where(mask_of(f.case), sums(f.case), g) for g in gradients(f.case)]
        ),
        # Where nothing was sent it is the rank's own gradient, which may happen to be the mean.
        "mean_or_maximum": lambda f: (
            any(trace.sent() for trace in f.traces)
            and any(
                f.answers_are([np.where(mask_of(f.case), reduced(gradients(f.case), axis=0), 0.0)] * f.case.ranks)
                for reduced in (np.mean, np.max)
            )
        ),
        "mask_is_inverted": lambda case: [np.where(mask_of(case), g, sums(case)) for g in gradients(case)],
        "own_gradient": lambda f: any(
            f.answers_are([times * g * mask_of(f.case) for g in gradients(f.case)]) for times in (1, f.case.ranks)
        ),
    },
)

EXERCISES = [KEPT]
