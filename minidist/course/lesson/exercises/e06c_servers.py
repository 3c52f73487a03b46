"""Lesson 06c: a gradient's sum through servers that each own a part of it.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, is_wrong, summed
from minidist.course.lesson.hint_file import hints_of


def servers_of(case: Case) -> int:
    """Return how many of the ranks are servers: at least one, and at least one rank works."""
    return 1 + int(case.generator().integers(0, case.ranks - 1))


def gradient_of(case: Case, rank: int) -> np.ndarray:
    """Return a worker's gradient, in whole numbers; a server has an array of nan of the same size."""
    if rank < servers_of(case):
        return np.full(case.size, np.nan)
    return case.generator(rank).integers(-9, 10, case.size).astype(float)


def answers(case: Case, mean: bool = False) -> list[np.ndarray]:
    """Return what each rank must return: a server the sum of its part, a worker all of it."""
    servers = servers_of(case)
    total = sum(gradient_of(case, rank) for rank in range(servers, case.ranks)) + np.zeros(case.size)
    if mean:
        total = total / (case.ranks - servers)
    parts = np.array_split(total, servers)
    return [parts[rank] if rank < servers else total for rank in range(case.ranks)]


def least(case: Case) -> Least:
    """Return the least with which the workers, and of each element one server, know the sum of the workers'."""
    workers = case.ranks - servers_of(case)
    return summed(workers, workers + 1, case.size)


def no_worker_has_a_sum(failure: Failure) -> bool:
    """Return whether every worker returns zeros, or the gradient that it was given."""
    workers = list(enumerate(failure.answers))[servers_of(failure.case) :]
    return is_wrong(failure) and all(
        not np.any(got) or np.array_equal(got, gradient_of(failure.case, rank)) for rank, got in workers
    )


def cases() -> list[Case]:
    draw = np.random.default_rng(0)
    small = [Case(ranks, size) for ranks in (2, 3, 4, 5) for size in (0, 1, 4, 7)]
    return sorted([*small, *(Case(int(draw.integers(2, 8)), int(draw.integers(0, 40)), seed) for seed in range(1, 9))])


EXERCISES = [
    Exercise(
        name="06c.through_servers",
        arguments=lambda case, rank: (servers_of(case), gradient_of(case, rank)),
        expected=answers,
        cases=cases,
        draw=lambda generator: Case(
            int(generator.integers(2, 9)), int(generator.integers(0, 40)), int(generator.integers(100, 1 << 30))
        ),
        least=least,
        par=Case(5, 12),
        label=lambda case: f"{servers_of(case)} servers, {case.ranks - servers_of(case)} workers, {case.size} elements",
        limits=("bytes", "messages"),
        hints=hints_of(
            globals(), "06c.through_servers", not_a_number=lambda f: any(np.isnan(answer).any() for answer in f.answers)
        ),
    )
]
