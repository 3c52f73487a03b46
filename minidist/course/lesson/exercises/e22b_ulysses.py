"""Lesson 22b: attention between two exchanges, of tokens for heads and back."""

from typing import Any

import numpy as np

from minidist.core.base.layout import offsets
from minidist.course.lesson.exercise import Case, Exercise, Least
from minidist.course.lesson.exercises.e22_ring_attention import SIZE, counts, split


def heads(case: Case) -> int:
    """Return the heads of the model, one or two for each rank."""
    return case.ranks * (1 + case.size % 2)


def data(case: Case) -> np.ndarray:
    """Return q, k and v of all tokens: (3, tokens, heads, SIZE)."""
    return case.generator().normal(size=(3, sum(counts(case)), heads(case), SIZE))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the attention of each head on one device, without a mask: (tokens, heads, SIZE) like its arguments."""
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed: np.ndarray = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v)
    return mixed


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    first, last = offsets(counts(case))[rank : rank + 2]
    return (*(part[first:last].copy() for part in data(case)), counts(case), attend)


def truth(case: Case) -> list[np.ndarray]:
    return split(case, attend(*data(case)))


def least(case: Case) -> Least:
    """Return what comes in for a rank's tokens: a number for each of theirs, or the others' keys and values."""
    own = np.array(counts(case))
    numbers = heads(case) * SIZE * np.minimum(own, 2 * (own.sum() - own)).sum()
    return Least(2 * (case.ranks - 1), int(8 * numbers))


def own_tokens_only(case: Case) -> list[np.ndarray]:
    return [attend(*parts) for parts in zip(*(split(case, part) for part in data(case)), strict=True)]


def never_back(case: Case) -> list[np.ndarray]:
    """Return the answers when the outputs of a rank's heads stay there."""
    return np.split(attend(*data(case)), case.ranks, axis=1)


def joined_as_tokens(case: Case) -> list[np.ndarray]:
    """Return the answers when what comes back is read as (own tokens, heads), and is (ranks, own tokens, own heads)."""
    return [
        np.concatenate([piece.ravel() for piece in np.split(own, case.ranks, axis=1)]).reshape(own.shape)
        for own in truth(case)
    ]


EXERCISES = [
    Exercise(
        name="22b.ulysses",
        arguments=arguments,
        expected=truth,
        least=least,
        par=Case(4, 12),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.ranks + case.size} tokens, {heads(case)} heads"
        ),
        limits=("messages", "bytes"),
        tolerance=1e-8,
    )
]
