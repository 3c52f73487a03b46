"""Lesson 11: a ZeRO step on a flat partition with padding."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, difference, is_wrong, reduced_to_all

RATE = 0.5


class Update:
    """`update(weights, gradient)`: make one step of SGD, in place, and count the elements."""

    def __init__(self) -> None:
        self.elements = 0

    def __call__(self, weights: np.ndarray, gradient: np.ndarray) -> None:
        self.elements += weights.size
        weights -= RATE * gradient


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Return the shapes of `case.size` small parameters of one or two dimensions."""
    draw = case.generator()
    return [tuple(int(n) for n in draw.integers(1, 5, int(draw.integers(1, 3)))) for _ in range(case.size)]


def data(case: Case, *more: int) -> list[np.ndarray]:
    draw = case.generator(*more)
    return [draw.integers(-50, 50, shape) * 1.0 for shape in shapes(case)]


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    return data(case, 0), data(case, 1, rank), Update()


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(array.reshape(-1) for array in arrays)])


def truth(case: Case) -> list[np.ndarray]:
    total = np.sum([flat(data(case, 1, rank)) for rank in range(case.ranks)], axis=0)
    return [flat(data(case, 0)) - RATE * total] * case.ranks


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    for rank, ((weights, _), wanted) in enumerate(zip(answers, truth(case), strict=True)):
        problem = difference(weights, wanted, 1e-9)
        if problem:
            return f"rank {rank}: {problem}"
    share = -(-truth(case)[0].size // case.ranks)
    for rank, (_, elements) in enumerate(answers):
        if elements > share:
            return f"the weights are right, but rank {rank} updated {elements} elements; its share is {share}"
    return ""


def right_in_places(failure: Failure) -> bool:
    """Return whether some weights are as before the step and all others are right."""
    if failure.kind != "wrong" or "updated" in failure.message:
        return False
    before, after = flat(data(failure.case, 0)), truth(failure.case)[0]
    return all(np.all((w == before) | (w == after)) and np.any(w == before) for w, _ in failure.answers)


def stepped_by(failure: Failure, reduced: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Return whether the weights are those of a step by reduced((ranks, elements)), on every rank."""
    case = failure.case
    gradients = np.stack([flat(data(case, 1, rank)) for rank in range(case.ranks)])
    wanted = flat(data(case, 0)) - RATE * reduced(gradients)
    return is_wrong(failure) and all(np.allclose(weights, wanted) for weights, _ in failure.answers)


def own_shards(gradients: np.ndarray) -> np.ndarray:
    """Return each shard's gradient as its own rank has it."""
    size = -(-gradients.shape[1] // len(gradients))
    elements = np.arange(gradients.shape[1])
    own: np.ndarray = gradients[elements // max(1, size), elements]
    return own


EXERCISES = [
    Exercise(
        name="11.zero_step",
        arguments=arguments,
        answer=lambda arguments, returned: (flat(arguments[0]), arguments[2].elements),
        check_answers=check_answers,
        least=reduced_to_all(lambda case: flat(data(case, 0)).size),
        par=Case(4, 16),
        unit="parameter",
        limits=("bytes",),
        for_hints={
            "only_the_first_rank": lambda f: (
                right_in_places(f) and all(((w == flat(data(f.case, 0))).all() for w, _ in f.answers))
            ),
            "not_gathered": lambda f: (
                right_in_places(f) and (not all((np.array_equal(w, f.answers[0][0]) for w, _ in f.answers)))
            ),
            "averaged": lambda f: stepped_by(f, lambda gradients: np.mean(gradients, axis=0)),
            "of_own_shards": lambda f: stepped_by(f, own_shards),
        },
    )
]
