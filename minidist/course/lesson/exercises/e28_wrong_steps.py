"""Lesson 28: which training steps compute another gradient than one device does?"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing

SHOWN = 4  # steps of a case


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean squared error of all rows, on one device."""
    result: np.ndarray = 2 * x.T @ (x @ w - y) / len(y)
    return result


def own_rows(comm: Comm, rows: int) -> np.ndarray:
    return np.array_split(np.arange(rows), comm.size)[comm.rank]


# Steps: each returns the gradient that its rank has in the end. Two of them are right. -------------------------------


def by_counts(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Right: a rank's mean counts as often as it has rows."""
    mine = own_rows(comm, len(y))
    result: np.ndarray = all_reduce(comm, len(mine) * gradient(w, x[mine], y[mine])) / len(y)
    return result


def by_turns(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Right: rows are dealt out one by one, so they are added in another order."""
    mine = np.arange(comm.rank, len(y), comm.size)
    result: np.ndarray = all_reduce(comm, len(mine) / len(y) * gradient(w, x[mine], y[mine]))
    return result


def mean_of_means(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Wrong where the ranks have different numbers of rows."""
    mine = own_rows(comm, len(y))
    result: np.ndarray = all_reduce(comm, gradient(w, x[mine], y[mine])) / comm.size
    return result


def without_remainder(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Wrong where the rows cannot be divided equally: the last ones are not read."""
    count = len(y) // comm.size
    mine = slice(comm.rank * count, (comm.rank + 1) * count)
    result: np.ndarray = all_reduce(comm, gradient(w, x[mine], y[mine])) / comm.size
    return result


def last_keeps_its_own(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Wrong on the last rank only, which goes on with the mean of its own rows."""
    mine = own_rows(comm, len(y))
    own = gradient(w, x[mine], y[mine])
    total = by_counts(comm, w, x, y)
    return own if comm.rank == comm.size - 1 else total


def entries_exchanged(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Wrong: two entries are in each other's place, which neither the sum nor the norm shows."""
    return by_counts(comm, w, x, y)[[1, 0, *range(2, len(w))]]


STEPS: tuple[Callable[..., np.ndarray], ...] = (
    by_counts,
    by_turns,
    mean_of_means,
    without_remainder,
    last_keeps_its_own,
    entries_exchanged,
)


def chosen(case: Case) -> list[int]:
    """Return which of STEPS a case has, in its order."""
    return [int(i) for i in case.generator().permutation(len(STEPS))[:SHOWN]]


def is_wrong_here(case: Case, step: int) -> bool:
    function = STEPS[step]
    if function in (mean_of_means, without_remainder):
        return bool(case.size % case.ranks)
    return function is entries_exchanged or (function is last_keeps_its_own and case.ranks > 1)


def truth(case: Case) -> list[int]:
    return [number for number, step in enumerate(chosen(case)) if is_wrong_here(case, step)]


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    wrong = truth(case)
    for rank, answer in enumerate(answers):
        found = [int(number) for number in answer]
        if found != wrong:
            return f"rank {rank} returns {found}; {wrong} of the {SHOWN} steps are wrong"
    return ""


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    """Return the numbers of the steps, for `setup`, and the batch: all ranks have all rows."""
    draw = case.generator(7)
    return chosen(case), draw.normal(size=3), draw.normal(size=(case.size, 3)), draw.normal(size=case.size)


def setup(comm: Comm, numbers: list[int], *batch: np.ndarray) -> tuple[Any, ...]:
    return [STEPS[number] for number in numbers], gradient, *batch


def missed(failure: Failure, function: Callable[..., np.ndarray]) -> bool:
    """Return whether rank 0's answer is without a step that is wrong, and this one is it."""
    case, found = failure.case, list(failure.answers[0])
    left_out = [step for number, step in enumerate(chosen(case)) if number in truth(case) and number not in found]
    return STEPS.index(function) in left_out


EXERCISES = [
    Exercise(
        name="28.wrong_steps",
        arguments=arguments,
        setup=setup,
        check_answers=check_answers,
        cases=lambda: sorted(
            Case(ranks, rows, seed) for ranks in (1, 2, 3, 5) for rows in (10, 11, 12) for seed in range(2)
        ),
        draw=drawing((1, 6), (6, 40)),
        par=Case(3, 11, 1),
        unit="row",
        for_hints={
            "ranks_differ": lambda f: any(list(answer) != list(f.answers[0]) for answer in f.answers),
            "right_ones_named": lambda f: bool(set(f.answers[0]) - set(truth(f.case))),
            "missed_exchange": lambda f: missed(f, entries_exchanged),
            "missed_last": lambda f: missed(f, last_keeps_its_own),
        },
    )
]
