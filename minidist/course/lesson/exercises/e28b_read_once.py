"""Lesson 28b: have all ranks together read each sample once, without sending the numbers of the samples?"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, drawing

# What is read in place of what, by the seed: the same numbers of samples with the same sum, and with the same sum of
# squares too.
SAME_SUM = ((0, 3), (1, 2))
SAME_SQUARES = ((0, 4, 5), (1, 2, 6))


def kind(case: Case) -> str:
    """Return what is wrong in a case."""
    kinds = ["nothing", "twice", "same sum", "fewer", "same squares"]
    return kinds[case.seed % 5]


def numbers_read(case: Case) -> list[np.ndarray]:
    """Return the numbers that each rank has read; some ranks may have read none."""
    draw = case.generator()
    read = np.arange(case.size)
    if kind(case) == "twice":
        read[0] = case.size - 1
    elif kind(case) == "fewer":
        read = read[1:]
    elif kind(case).startswith("same"):
        old, new = SAME_SUM if kind(case) == "same sum" else SAME_SQUARES
        read[list(old)] = new
    owners = draw.integers(0, case.ranks, read.size)
    read = draw.permutation(read)
    order = np.argsort(owners, kind="stable")
    return np.split(read[order], np.searchsorted(owners[order], np.arange(1, case.ranks)))


def cases() -> list[Case]:
    """Return cases of every kind."""
    small = [Case(ranks, size, seed) for ranks in (1, 2, 3) for size in (8, 24) for seed in range(5)]
    return sorted([*small, Case(5, 60, 5), Case(8, 40, 1)])


def missed(failure: Failure, what: str) -> bool:
    """Return whether the answer takes a wrong epoch of this kind for a right one."""
    return failure.kind == "wrong" and kind(failure.case) == what and failure.answers[0] == 1


EXERCISES = [
    Exercise(
        name="28b.read_once",
        arguments=lambda case, rank: (numbers_read(case)[rank].copy(), case.size),
        expected=lambda case: [int(kind(case) == "nothing")] * case.ranks,
        cases=cases,
        draw=drawing((1, 8), (8, 80)),
        least=lambda case: Least(2 * (case.ranks - 1), 2 * (case.ranks - 1)),
        par=Case(4, 80, 5),
        limits=("bytes",),
        unit="sample",
        for_hints={"ranks_differ": lambda f: any(answer != f.answers[0] for answer in f.answers)},
    )
]
