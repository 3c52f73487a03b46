"""Lesson 22: attention to keys and values that are passed round a ring, merged by an online softmax."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least

SIZE = 2


def counts(case: Case) -> list[int]:
    """Return the rows of each rank: at least one token per rank, ragged."""
    return chunk_sizes(case.ranks + case.size, case.ranks)


def data(case: Case) -> tuple[np.ndarray, ...]:
    """Return q, k, v of all tokens; scores are in the hundreds."""
    draw, tokens = case.generator(), case.ranks + case.size
    q, k, v = draw.normal(size=(3, tokens, SIZE))
    return q * 40, k * 40, v


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    first, last = offsets(counts(case))[rank : rank + 2]
    return (*(part[first:last].copy() for part in data(case)), counts(case))


def least(case: Case) -> Least:
    """Return what comes in for a rank's rows: a number for each of theirs, or the others' keys and values."""
    own = np.array(counts(case))
    return Least(2 * (case.ranks - 1), int(8 * SIZE * np.minimum(own, 2 * (own.sum() - own)).sum()))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed: np.ndarray = (weights / weights.sum(axis=1, keepdims=True)) @ v
    return mixed


def split(case: Case, whole: np.ndarray) -> list[np.ndarray]:
    return np.split(whole, offsets(counts(case))[1:-1])


def truth(case: Case) -> list[np.ndarray]:
    return split(case, attend(*data(case)))


def blocks(case: Case, merge: Callable[[np.ndarray, int], np.ndarray]) -> list[np.ndarray]:
    """Return merge(outputs of the blocks in the order of arrival, rank) for each rank's queries."""
    q, k, v = (split(case, part) for part in data(case))
    n = case.ranks
    return [
        merge(np.stack([attend(q[r], k[(r - step) % n], v[(r - step) % n]) for step in range(n)]), r) for r in range(n)
    ]


def without_scaling(case: Case, sums: bool = True, outputs: bool = True) -> list[np.ndarray]:
    """Return the outputs when a new maximum does not rescale the sums, the outputs, or both of what was before."""
    q, k, v = (split(case, part) for part in data(case))
    results = []
    for r in range(case.ranks):
        largest, total, out = np.full(len(q[r]), -np.inf), np.zeros(len(q[r])), np.zeros(q[r].shape)
        for step in range(case.ranks):
            owner = (r - step) % case.ranks
            scores = q[r] @ k[owner].T / np.sqrt(SIZE)
            new = np.maximum(largest, scores.max(axis=1))
            old, now = np.exp(largest - new), np.exp(scores - new[:, None])
            total = total * (1 if sums else old) + now.sum(axis=1)
            out = out * (1 if outputs else old[:, None]) + now @ v[owner]
            largest = new
        results.append(out / total[:, None])
    return results


def scaled(case: Case, by: float) -> tuple[np.ndarray, ...]:
    """Return q, k, v with the queries multiplied by a number."""
    q, k, v = data(case)
    return q * by, k, v


def not_finite(f: Failure) -> bool:
    return f.kind == "wrong" and any(a is not None and not np.isfinite(np.asarray(a, float)).all() for a in f.answers)


EXERCISES = [
    Exercise(
        name="22.ring_attention",
        arguments=arguments,
        expected=truth,
        least=least,
        par=Case(4, 12),
        label=lambda case: f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.ranks + case.size} tokens",
        limits=("bytes", "messages"),
        tolerance=1e-8,
        for_hints={
            "averaged_blocks": lambda f: f.answers_are(blocks(f.case, lambda outputs, rank: outputs.mean(axis=0))),
            "first_block": lambda f: f.answers_are(blocks(f.case, lambda outputs, rank: outputs[0])),
            "other_scale": lambda f: any(
                f.answers_are(split(f.case, attend(*scaled(f.case, by)))) for by in (SIZE**0.5, SIZE ** (-0.5))
            ),
            "keys_for_values": lambda case: split(case, attend(data(case)[0], *data(case)[:0:-1])),
            "not_rescaled": lambda f: any(
                (
                    f.answers_are(without_scaling(f.case, sums, outputs))
                    for sums, outputs in ((True, True), (True, False), (False, True))
                )
            ),
            "of_the_right_direction": lambda f: bool(
                np.ptp(np.vstack(f.answers) / np.vstack(f.expected), axis=1).max() < 1e-09
            ),
        },
    )
]
