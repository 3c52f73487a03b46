"""Lesson 06d: sums of signs times a length, where each rank keeps what it has not sent for its next step."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Least, drawing

LENGTH = 20  # elements of a gradient, whose signs are three bytes
SENT = 3 + 8  # bytes of the signs and the length of one step


def gradients(case: Case) -> np.ndarray:
    """Return (ranks, steps, LENGTH) gradients whose mean is not zero."""
    return 0.3 + case.generator().normal(size=(case.ranks, case.size, LENGTH))


def trained(case: Case, mistake: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return every rank's (sums, residual), as the rule makes them or as a typical mistake does."""
    own = gradients(case)
    sums, residuals = np.zeros(own.shape[1:]), np.zeros((case.ranks, LENGTH))
    for step in range(case.size):
        gradient = own[:, step]
        corrected = gradient + (0 if mistake == "forgets" else residuals)
        basis = gradient if mistake == "length of the gradient" else corrected
        sizes = np.abs(basis).max(axis=1) if mistake == "largest" else np.abs(basis).mean(axis=1)
        sent = sizes[:, None] * np.where(corrected >= 0, 1.0, -1.0)
        sums[step] = sent.sum(axis=0)
        if mistake == "averaged":
            sums[step] /= case.ranks
        left = {"last step only": gradient - sent, "minus the sum": corrected - sums[step]}
        left["thrown away"] = np.zeros_like(residuals)
        residuals = left.get(mistake, corrected - sent)
    return [(sums, residual) for residual in residuals]


EXERCISES = [
    Exercise(
        name="06d.sign_feedback",
        arguments=lambda case, rank: (gradients(case)[rank],),
        expected=trained,
        least=lambda case: Least(*[2 * (case.ranks - 1) * of for of in (case.size > 0, case.size * SENT)]),
        par=Case(4, 5),
        unit="step",
        draw=drawing((1, 9), (0, 9)),
        cases=lambda: sorted(Case(ranks, steps) for ranks in (1, 2, 3, 4, 8) for steps in (0, 1, 2, 5)),
        limits=("bytes",),
    )
]
