"""Lesson 14b: an MLP between layers whose rows are split over the ranks, and a cross-entropy whose words are."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, is_wrong

ROWS = 5
WIDTH, OWN = 4, 2  # of the MLP: the numbers of a row, and the rows of a rank


def whole(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of all words, far apart and far from 0, and targets, the first and the last word among them."""
    draw, words = case.generator(), 8 * case.ranks + case.size
    targets = draw.integers(0, words, ROWS)
    targets[:3] = 0, words - 1, words // 2
    logits = draw.normal(size=(ROWS, words)) * 300 + 900
    if (case.size + case.seed) % 2:
        logits[:, 0] += 3000  # so far above those of other ranks that their mean is no largest logit
    return logits, targets


def starts(case: Case) -> list[int]:
    return offsets(chunk_sizes(8 * case.ranks + case.size, case.ranks))


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    logits, targets = whole(case)
    first, last = starts(case)[rank : rank + 2]
    return logits[:, first:last].copy(), targets, first


def entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(ROWS)
    shifted = logits - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[rows, targets]
    probabilities[rows, targets] -= 1
    return losses, probabilities


def truth(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    losses, gradient = entropy(*whole(case))
    return [(losses, part) for part in np.split(gradient, starts(case)[1:-1], axis=1)]


def by_rank(f: Failure, make: Callable[[np.ndarray, np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]) -> bool:
    """Return whether the answers are what `make(logits, targets, first, last)` gives on each rank."""
    logits, targets = whole(f.case)
    bounds = starts(f.case)
    with np.errstate(all="ignore"):
        return f.answers_are([make(logits, targets, *bounds[r : r + 2]) for r in range(f.case.ranks)])


def own_softmax(logits: np.ndarray, targets: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalise each rank's own words; the target's logit counts where it is."""
    rows, mine = np.arange(ROWS), (targets >= first) & (targets < last)
    own = logits[:, first:last] - logits[:, first:last].max(axis=1, keepdims=True)
    gradient = np.exp(own) / np.exp(own).sum(axis=1, keepdims=True)
    target = np.zeros(ROWS)
    target[mine] = own[rows[mine], targets[mine] - first]
    gradient[rows[mine], targets[mine] - first] -= 1
    return np.log(np.exp(own).sum(axis=1)) - target, gradient


def own_maxima(f: Failure) -> bool:
    """Return whether each rank's logits were shifted by their own maximum and the exponentials added all the same."""
    if f.kind != "wrong" or not all(isinstance(a, tuple) and len(a) == 2 for a in f.answers):
        return False
    logits, targets = whole(f.case)
    parts = np.split(logits, starts(f.case)[1:-1], axis=1)
    shifted = np.concatenate([part - part.max(axis=1, keepdims=True) for part in parts], axis=1)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(ROWS), targets]
    return bool(np.allclose(f.answers[0][0], losses))


def without_target(f: Failure) -> bool:
    """Return whether the losses are the logarithm of the sum alone, the same on all ranks."""
    if f.kind != "wrong" or not all(isinstance(a, tuple) and len(a) == 2 for a in f.answers):
        return False
    logits, _ = whole(f.case)
    sums = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))
    return all(np.shape(a[0]) == sums.shape and np.allclose(a[0], sums) for a in f.answers)


def scaled_gradient(f: Failure) -> bool:
    """Return whether every gradient is divided by the rows."""
    pairs = zip(f.answers, f.expected, strict=True)
    return is_wrong(f) and all(np.allclose(np.asarray(a[1]) * ROWS, e[1]) for a, e in pairs)


def losses_of_the_ranks(f: Failure) -> bool:
    """Return whether the ranks disagree on a loss."""
    complete = f.kind == "wrong" and all(isinstance(a, tuple) and len(a) == 2 for a in f.answers)
    return complete and any(not np.allclose(a[0], f.answers[0][0]) for a in f.answers)


def target_elsewhere(f: Failure) -> bool:
    """Return whether the ranks agree on finite but wrong losses: another logit was taken for the target's."""
    if f.kind != "wrong" or losses_of_the_ranks(f) or not all(isinstance(a, tuple) and len(a) == 2 for a in f.answers):
        return False
    return bool(np.isfinite(f.answers[0][0]).all())


# --- the MLP ---


def mlp_parts(case: Case) -> dict[str, np.ndarray]:
    """Return whole matrices of integers, with two rows and `case.size` columns of A for each rank."""
    draw, hidden, rows = case.generator(), case.ranks * case.size, case.ranks * OWN
    shapes = {"x": (rows, WIDTH), "a": (WIDTH, hidden), "b": (hidden, WIDTH), "gradient": (rows, WIDTH)}
    return {name: draw.integers(-4, 5, shape) * 1.0 for name, shape in shapes.items()}


def mlp_arguments(case: Case, rank: int) -> tuple[Any, ...]:
    p, columns = mlp_parts(case), slice(rank * case.size, (rank + 1) * case.size)
    rows = slice(rank * OWN, (rank + 1) * OWN)
    return p["x"][rows].copy(), p["a"][:, columns].copy(), p["b"][columns].copy(), p["gradient"][rows].copy()


def mlp_truth(case: Case, mean: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each rank's rows of y and of x's gradient; or those of a mean over the ranks."""
    p = mlp_parts(case)
    hidden = np.maximum(p["x"] @ p["a"], 0)
    y = hidden @ p["b"]
    slope = ((p["gradient"] @ p["b"].T) * (hidden > 0)) @ p["a"].T
    scale = case.ranks if mean else 1
    return [(y[i : i + OWN] / scale, slope[i : i + OWN] / scale) for i in range(0, len(y), OWN)]


def own_columns(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what a rank computes without a message: its rows, from its columns alone."""
    result = []
    for rank in range(case.ranks):
        x, a, b, gradient = mlp_arguments(case, rank)
        hidden = np.maximum(x @ a, 0)
        result.append((hidden @ b, ((gradient @ b.T) * (hidden > 0)) @ a.T))
    return result


EXERCISES = [
    Exercise(
        name="14b.split_mlp",
        arguments=mlp_arguments,
        expected=mlp_truth,
        par=Case(4, 8),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.size} column{'s' * (case.size != 1)} of A on each"
        ),
        limits=("bytes",),
    ),
    Exercise(
        name="14b.split_cross_entropy",
        arguments=arguments,
        expected=truth,
        least=lambda case: Least(2 * (case.ranks - 1), 8 * 3 * ROWS * (case.ranks - 1)),
        par=Case(4, 0),
        label=lambda case: f"{case.ranks} rank{'s' * (case.ranks != 1)}, {8 * case.ranks + case.size} words",
        limits=("bytes",),
        for_hints={
            "not_finite": lambda f: any(not np.isfinite(part).all() for a in f.answers if a is not None for part in a),
            "of_its_own_softmax": lambda f: by_rank(f, own_softmax),
            "always_negative": lambda f: all(np.all(np.asarray(a[0]) < 0) for a in f.answers),
        },
    ),
]
