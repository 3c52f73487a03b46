"""Lesson 06e: the outer step of DiLoCo, after replicas have trained alone."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, reduced_to_all

LR, MU = 0.5, 0.75


def data(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the common weights, the ranks' weights (ranks, size), and the momentum, in whole numbers."""
    draw = case.generator()
    common, momentum = draw.integers(-9, 10, (2, case.size)) * 1.0
    return common, draw.integers(-9, 10, (case.ranks, case.size)) * 1.0, momentum


def stepped(case: Case, kind: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what the rule gives on every rank, or what a typical mistake does."""
    common, weights, momentum = data(case)
    average = np.broadcast_to(weights.sum(axis=0) if kind == "sum" else weights.mean(axis=0), weights.shape)
    gradient = common - (weights if kind == "own" else average)
    if kind == "sign":
        gradient = -gradient
    new = MU * momentum + gradient * (1 - MU if kind == "weighted" else 1)
    step = new if kind == "heavy ball" else gradient + MU * new
    first = weights if kind == "from own" else common
    return list(zip(first - LR * step, gradient if kind == "no momentum" else new, strict=True))


EXERCISES = [
    Exercise(
        name="06e.outer_step",
        arguments=lambda case, rank: (data(case)[0], data(case)[1][rank], data(case)[2], LR, MU),
        expected=stepped,
        least=reduced_to_all(lambda case: case.size),
        par=Case(4, 8),
        limits=("bytes",),
    )
]
