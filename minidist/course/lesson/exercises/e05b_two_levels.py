"""Lesson 05b: an all-reduce over machines of unequal size, where only the slow links between them take time."""

import numpy as np

from minidist.comm.sim.links import LinkModel
from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing, is_wrong, reduced_to_all, standard_cases

MACHINES = (0, 1, 0, 0, 1, 2, 2, 1, 0)  # the machine of each rank; a case takes the first ranks
NUMBERS = 100  # for each unit of a case's size
BETWEEN = (1e-5, 1e-8)  # (alpha, beta) of a link between two machines; one inside a machine takes no time


def seconds(source: int, destination: int) -> tuple[float, float]:
    """Return (alpha, beta) of the link between two ranks."""
    return BETWEEN if MACHINES[source] != MACHINES[destination] else (0.0, 0.0)


def data(case: Case, rank: int) -> np.ndarray:
    """Return whole numbers, so that the order of the additions does not matter."""
    return case.generator(rank).integers(1, 1000, NUMBERS * case.size).astype(np.float64)


def total(case: Case) -> np.ndarray:
    return np.sum([data(case, rank) for rank in range(case.ranks)], axis=0)


def of_own_machine(case: Case) -> list[np.ndarray]:
    """Return the sums that the ranks have after the first of three phases."""
    return [
        np.sum([data(case, other) for other in range(case.ranks) if MACHINES[other] == MACHINES[rank]], axis=0)
        for rank in range(case.ranks)
    ]


def leaders_only(failure: Failure) -> bool:
    """Return whether the first rank of each machine has the sum, and others do not."""
    case = failure.case
    right = {rank for rank, answer in enumerate(failure.answers) if np.array_equal(answer, total(case))}
    return right == {MACHINES.index(machine) for machine in MACHINES[: case.ranks]}


EXERCISES = [
    Exercise(
        name="05b.two_level_sum",
        arguments=lambda case, rank: (data(case, rank), list(MACHINES[: case.ranks])),
        expected=lambda case: [total(case)] * case.ranks,
        cases=lambda: [case for case in standard_cases() if case.size],
        draw=drawing((1, 9), (1, 40)),
        least=reduced_to_all(lambda case: NUMBERS * case.size),
        par=Case(7, 10),
        limits=("time",),
        links=LinkModel(link=seconds),
        written_by_hand=("minidist.collectives.two_level", "minidist.collectives.auto"),
        label=lambda case: f"ranks on the machines {list(MACHINES[: case.ranks])}, {NUMBERS * case.size:,} numbers",
        for_hints={
            "wrong_on_others": lambda f: is_wrong(f) and leaders_only(f),
            "own_machine": lambda f: f.answers_are(of_own_machine(f.case)),
            "too_large": lambda f: is_wrong(f) and all(np.all(a >= total(f.case)) for a in f.answers),
        },
    )
]
