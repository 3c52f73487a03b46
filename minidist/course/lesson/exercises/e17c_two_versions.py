"""Lesson 17c: one stage of PipeDream-2BW, which keeps two versions of its weights."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, difference, drawing
from minidist.course.lesson.exercises.e17b_weight_stashing import RATE, Gradient, gradient_of, start, wrong_length


class CountedGradient:
    """A gradient that counts how many of the versions it was called with are alive, without the first one."""

    def __init__(self, gradient: Gradient, first: np.ndarray) -> None:
        self.gradient, self.first, self.most = gradient, first, 0
        self.used: list[weakref.ref[np.ndarray]] = []

    def __call__(self, i: int, weights: np.ndarray) -> np.ndarray:
        owner = weights if weights.base is None else weights.base
        if owner is not self.first and not any(known() is owner for known in self.used):
            self.used.append(weakref.ref(owner))
        self.most = max(self.most, sum(known() is not None for known in self.used))
        return self.gradient(i, weights)


def collected(arguments: tuple[Any, ...], returned: Any) -> Any:
    """Return the weights after each update and the most versions that were alive; what is no iterable as it is."""
    if not isinstance(returned, Iterable):
        return returned
    history = tuple(np.array(weights) for weights in islice(returned, 1000))
    return history, arguments[2].most


def check_two_versions(case: Case, answers: Sequence[Any]) -> str:
    history, most = answers[0]
    problem = difference(history, tuple(with_delay(case, 1)), 1e-9)
    if problem or most <= 2:
        return problem
    return f"the weights are right, but {most} versions that gradients were computed with are alive at once"


def batches_of(case: Case) -> int:
    return 6 * (case.size + 1)


def two_arguments(case: Case) -> tuple[list[str], np.ndarray, Gradient, int]:
    m = case.size + 1
    ahead, everything = case.size, batches_of(case)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(everything):
        order += [f"F{ahead + i}"] * (ahead + i < everything) + [f"B{i}"]
    first = start(case)
    return order, first, CountedGradient(gradient_of(case), first), m


def with_delay(case: Case, delay: int, mean: bool = False, rate: float = RATE) -> list[np.ndarray]:
    order, weights, gradient, m = two_arguments(case)
    versions = [weights]
    for b in range(len(order) // 2 // m):
        total = sum(gradient(k, versions[max(b - delay, 0)]) for k in range(b * m, (b + 1) * m))
        versions.append(versions[-1] - rate * total / (m if mean else 1))
    return versions[1:]


def delayed_by(failure: Failure, delay: int, mean: bool = False, rate: float = RATE) -> bool:
    """Return whether these are the weights with that delay."""
    wanted = tuple(with_delay(failure.case, delay, mean, rate))
    return failure.kind == "wrong" and not difference(failure.answers[0][0], wanted, 1e-9)


def all_alike(failure: Failure) -> bool:
    """Return whether all weights of the history are equal, as those of one array are."""
    history = failure.answers[0][0]
    return failure.kind == "wrong" and len(history) > 1 and all(np.array_equal(w, history[0]) for w in history)


EXERCISES = [
    Exercise(
        name="17c.two_versions",
        arguments=lambda case, rank: two_arguments(case),
        answer=collected,
        check_answers=check_two_versions,
        cases=lambda: [Case(1, ahead, seed) for ahead in (0, 1, 2, 3) for seed in (0, 1)],
        draw=drawing((1, 1), (0, 5)),
        par=Case(1, 3, 1),
        label=lambda case: (
            f"{case.size} forward{'s' * (case.size != 1)} ahead,"
            f" {batches_of(case)} micro-batches in batches of {case.size + 1}"
        ),
        communicates=False,
        generator=True,
        for_hints={"wrong_length": wrong_length, "one_array_differs": lambda f: "arrays" not in f.message},
    )
]
