"""Lesson 17b: one stage of PipeDream, where each mini-batch keeps the weights it began with."""

from collections.abc import Callable, Sequence

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing, is_wrong

Gradient = Callable[[int, np.ndarray], np.ndarray]  # (mini-batch, weights) -> its gradient at these weights
RATE = 0.25


def order_of(case: Case) -> list[str]:
    """Return the order of the stage `size` ranks before the last: `size` forwards ahead, then pairs of F and B."""
    ahead, m = case.size, count(case)
    order = [f"F{i}" for i in range(min(ahead, m))]
    for i in range(m):
        order += [f"F{ahead + i}"] * (ahead + i < m) + [f"B{i}"]
    return order


def count(case: Case) -> int:
    return 3 + 2 * case.seed


def gradient_of(case: Case) -> Gradient:
    """Return a gradient that is not linear in the weights, so that an answer shows which ones were used."""
    targets = case.generator().normal(size=(64, 3))
    return lambda i, weights: (weights - targets[i]) + 0.1 * weights**3


def start(case: Case) -> np.ndarray:
    return case.generator(1).normal(size=3)


def latest_weights(order: Sequence[str], weights: np.ndarray, gradient: Gradient) -> list[np.ndarray]:
    history = []
    for action in order:
        if action[0] == "B":
            weights = weights - RATE * gradient(int(action[1:]), weights)
            history.append(weights)
    return history


def replayed(case: Case) -> list[np.ndarray]:
    """Return the weights after each update: mini-batch i uses those of as many updates as there are before its F."""
    order, first, gradient = arguments(case)
    versions = [first]
    for i in range(count(case)):
        seen = sum(action[0] == "B" for action in order[: order.index(f"F{i}")])
        versions.append(versions[-1] - RATE * gradient(i, versions[seen]))
    return versions[1:]


def mistaken(case: Case, mistake: str) -> list[tuple[np.ndarray, ...]]:
    """Return what a typical mistake makes of the order."""
    order, weights, gradient = arguments(case)
    begun, history, first = {}, [], weights
    for action in order:
        kind, i = action[0], int(action[1:])
        if kind == "F":
            begun[i] = weights
            continue
        seen = first if mistake == "first" else begun.pop(i)
        start_from = seen if mistake == "from the stash" else weights
        weights = start_from - (-RATE if mistake == "up" else RATE) * gradient(i, seen)
        history.append(weights)
    return [tuple(history)]


def arguments(case: Case) -> tuple[list[str], np.ndarray, Gradient]:
    return order_of(case), start(case), gradient_of(case)


def other_rate(failure: Failure) -> bool:
    """Return whether the first update is another multiple of the right one than 1."""
    before = start(failure.case)
    got, wanted = np.asarray(failure.answers[0][0]) - before, failure.expected[0][0] - before
    return is_wrong(failure) and not np.allclose(got, wanted) and np.ptp(got / wanted) < 1e-6


def wrong_length(failure: Failure) -> bool:
    return "expected" in failure.message and "arrays" in failure.message


def in_place(failure: Failure) -> bool:
    """Return whether all entries of the history are the same array."""
    answer = failure.answers[0] if failure.answers else None
    return isinstance(answer, list | tuple) and len(answer) > 1 and all(a is answer[0] for a in answer)


EXERCISES = [
    Exercise(
        name="17b.stashing",
        arguments=lambda case, rank: arguments(case),
        expected=lambda case: [tuple(replayed(case))],
        cases=lambda: [Case(1, ahead, seed) for ahead in (0, 1, 2, 3, 5) for seed in (0, 1, 3)] + [Case(1, 2, 5)],
        draw=drawing((1, 1), (0, 6), (0, 12)),
        par=Case(1, 3, 3),
        label=lambda case: f"{case.size} forward{'s' * (case.size != 1)} ahead, {count(case)} mini-batches",
        communicates=False,
        for_hints={
            "latest_weights_used": lambda case: [tuple(latest_weights(*arguments(case)))],
            "more_than_ten": lambda f: count(f.case) > 10,
        },
    )
]
