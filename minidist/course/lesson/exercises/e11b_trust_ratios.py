"""Lesson 11b: a step with trust ratios of whole layers, on shards."""

import numpy as np

from minidist.core.base.layout import chunk_sizes, cut
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least


def layers(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (weights, update) of each layer, in whole numbers; sometimes the first layer's weights are all zero."""
    draw = case.generator()
    result = []
    for layer in range(1 + case.size % 4):
        size = int(draw.integers(1, case.size + 3))
        weights, update = draw.integers(1, 9, (2, size)) * draw.choice([-1.0, 1.0], (2, size))
        # Not in the smallest cases: the first mistake that is shown is to be one about shards.
        zero = layer == 0 and case.size >= 4 and case.size % 2 == 0
        result.append((weights * (not zero), update))
    return result


def sizes_of(case: Case) -> list[list[int]]:
    """Return how many elements of each layer every rank holds: nearly equal shards of all layers together."""
    lengths = [len(weights) for weights, _ in layers(case)]
    owner = np.repeat(np.arange(case.ranks), chunk_sizes(sum(lengths), case.ranks))
    pieces = np.split(owner, np.cumsum(lengths)[:-1])
    return [[int(np.sum(piece == rank)) for piece in pieces] for rank in range(case.ranks)]


def least(case: Case) -> Least:
    """Return what the ranks that share a layer need: two norms at one of them, and a ratio back."""
    others = [sum(size > 0 for size in of_ranks) - 1 for of_ranks in zip(*sizes_of(case), strict=True)]
    return Least(max(2 * n for n in others), sum(8 * 3 * n for n in others))


def shards(case: Case, whole: list[np.ndarray]) -> list[np.ndarray]:
    array = np.concatenate(whole)
    return [np.array(part) for part in cut(array, chunk_sizes(array.size, case.ranks))]


def stepped(case: Case, ratio: str = "layer") -> list[np.ndarray]:
    """Return the new shards as the rule makes them, or as a typical mistake does."""
    if ratio == "own shard":
        return [
            _step_all(_split(sizes, w), _split(sizes, u))
            for sizes, w, u in zip(
                sizes_of(case),
                shards(case, [w for w, _ in layers(case)]),
                shards(case, [u for _, u in layers(case)]),
                strict=True,
            )
        ]
    weights, updates = zip(*layers(case), strict=True)
    if ratio == "model":
        return shards(case, [_step_all([np.concatenate(weights)], [np.concatenate(updates)])])
    power = {"inverse": -1.0, "no root": 2.0}.get(ratio, 1.0)
    return shards(case, [_step_all(list(weights), list(updates), power)])


def _split(sizes: list[int], array: np.ndarray) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1])


def _step_all(weights: list[np.ndarray], updates: list[np.ndarray], power: float = 1.0) -> np.ndarray:
    """Return the weights after a step by (norm of the weights / norm of the update)^power of each layer."""
    result = []
    for w, u in zip(weights, updates, strict=True):
        norms = np.linalg.norm(w), np.linalg.norm(u)
        result.append(w - (norms[0] / norms[1] if norms[0] and norms[1] else 1.0) ** power * u)
    return np.concatenate(result)


def not_a_number_or_stuck(failure: Failure) -> bool:
    """Return whether a layer of zeros did not move, or became NaN."""
    if failure.kind != "wrong" or any(answer is None for answer in failure.answers):
        return False
    first = np.concatenate(
        [np.asarray(a)[: s[0]] for a, s in zip(failure.answers, sizes_of(failure.case), strict=True)]
    )
    return not layers(failure.case)[0][0].any() and (not np.isfinite(first).all() or not first.any())


EXERCISES = [
    Exercise(
        name="11b.trust_ratio_step",
        arguments=lambda case, rank: (
            sizes_of(case)[rank],
            shards(case, [w for w, _ in layers(case)])[rank],
            shards(case, [u for _, u in layers(case)])[rank],
        ),
        expected=stepped,
        least=least,
        par=Case(4, 7),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {len(layers(case))} layer{'s' * (len(layers(case)) != 1)}"
        ),
        limits=("bytes", "messages"),
    )
]
