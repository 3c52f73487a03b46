"""Lesson 06d: sums of the largest elements, where each rank keeps what it has not sent for its next step."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, drawing, summed

LENGTH = 24  # elements of a gradient


def chosen(case: Case) -> int:
    """Return how many elements a rank sends in a step."""
    return 1 + case.size % 2


def gradients(case: Case) -> np.ndarray:
    """Return (ranks, steps, LENGTH) gradients; no two elements have the same absolute value."""
    return case.generator().normal(size=(case.ranks, case.size, LENGTH))


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return an array that is zero except for the elements of the largest absolute values."""
    places = np.argsort(-np.abs(values))[:count]
    result = np.zeros_like(values)
    result[places] = values[places]
    return result


def trained(case: Case, mistake: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return every rank's (sums, residual), as the rule makes them or as a typical mistake does."""
    own, k = gradients(case), chosen(case)
    sums, residuals = np.zeros(own.shape[1:]), np.zeros((case.ranks, LENGTH))
    for step in range(case.size):
        gradient = own[:, step]
        corrected = gradient + (0 if mistake == "forgets" else residuals)
        if mistake == "chosen by gradient":
            sent = np.stack([c * (largest(g, k) != 0) for c, g in zip(corrected, gradient, strict=True)])
        elif mistake == "signed":
            sent = np.stack([c * (largest(np.exp(c), k) != 0) for c in corrected])
        else:
            sent = np.stack([largest(c, k) for c in corrected])
        sums[step] = sent.sum(axis=0)
        if mistake == "averaged":
            sums[step] /= case.ranks
        left = {"last step only": gradient - sent, "minus the sum": corrected - sums[step]}
        left["added again"] = residuals + corrected - sent
        residuals = left.get(mistake, corrected - sent)
    return [(sums, residual) for residual in residuals]


EXERCISES = [
    Exercise(
        name="06d.error_feedback",
        arguments=lambda case, rank: (gradients(case)[rank], chosen(case)),
        expected=trained,
        least=lambda case: summed(case.ranks, case.ranks, chosen(case) * case.size),
        par=Case(4, 5),
        unit="step",
        draw=drawing((1, 9), (0, 9)),
        cases=lambda: sorted(Case(ranks, steps) for ranks in (1, 2, 3, 4, 8) for steps in (0, 1, 2, 5)),
        limits=("bytes",),
        for_hints={"thrown_away": lambda f: f.case.size and not np.any([residual for _, residual in f.answers])},
    )
]
