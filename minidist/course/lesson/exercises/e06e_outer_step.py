"""Lesson 06e: the outer step of DiLoCo, after replicas have trained alone.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Hint, is_wrong, reduced_to_all, returns

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
        hints=(
            Hint(
                lambda f: f.answers_are(stepped(f.case, "sign")),
                "a step goes against the gradient: it is the common weights minus the average",
            ),
            Hint(
                lambda f: f.answers_are(stepped(f.case, "own")),
                "each rank has stepped by its own way; average the weights first, so that all begin the next round"
                " alike",
            ),
            Hint(
                lambda f: f.answers_are(stepped(f.case, "heavy ball")),
                "this is a step by the momentum; Nesterov's is by the gradient plus mu times the new momentum",
            ),
            *(
                returns(lambda case, kind=kind: stepped(case, kind), text)  # type: ignore[misc]
                for kind, text in (
                    ("sum", "the weights of the ranks are added; their mean is asked for"),
                    ("from own", "the step begins at the rank's own weights; it begins at the common ones"),
                    ("no momentum", "the second result is the new momentum, not the gradient"),
                    ("weighted", "the gradient is added whole: the momentum is mu * momentum + gradient"),
                )
            ),
            Hint(
                is_wrong,
                "in this order: the gradient is common - average, it is added to mu * momentum, and the step is lr"
                " times (gradient + mu * the new momentum), subtracted from the common weights",
            ),
            Hint(lambda f: f.kind == "limit", "right, but too many bytes: one all-reduce of the weights is enough"),
        ),
    )
]
