"""Lesson 02b: steps of Adam on one array of weights."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, drawing

LR = 0.1


def data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and (steps, size) gradients of different scales; the last weight's are 0."""
    draw = case.generator()
    scales = 10.0 ** draw.integers(-2, 3, case.size) * (np.arange(case.size) < case.size - 1)
    return draw.normal(size=case.size), draw.normal(size=(1 + case.seed % 4, case.size)) * scales


def stepped(case: Case, mistake: str = "") -> list[np.ndarray]:
    """Return the weights after all steps, as the rule makes them or as a typical mistake does."""
    weights, gradients = data(case)
    first, second = {"exchanged": (0.999, 0.9), "rmsprop": (0.9, 0.99)}.get(mistake, (0.9, 0.999))
    m, v = np.zeros(case.size), np.zeros(case.size)
    for t, g in enumerate(gradients, 1):
        m = first * m + (1 - first) * g
        v = second * v + (1 - second) * g**2
        by = 1.0 if mistake == "uncorrected" else 1 - first**t
        square = v / (1.0 if mistake in ("uncorrected", "mean only", "rmsprop") else 1 - second**t)
        root = square if mistake == "no root" else np.sqrt(square)
        weights = weights - LR * (g if mistake in ("rmsprop", "gradient") else m / by) / (root + 1e-8)
    return [weights]


EXERCISES = [
    Exercise(
        name="02b.adam",
        arguments=lambda case, rank: (*data(case), LR),
        expected=stepped,
        cases=lambda: [Case(1, size, seed) for size in (1, 2, 3, 8) for seed in range(4)],
        draw=drawing((1, 1), (1, 20)),
        par=Case(1, 8, 3),
        unit="weight",
        communicates=False,
        written_by_hand=("minidist.optim", "minidist.core.optim"),
    )
]
