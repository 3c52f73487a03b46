"""Lesson 28: have all ranks together read each sample once, without sending the numbers of the samples?

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Hint, Least, drawing

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


def missed(what: str) -> Hint:
    """Return the hint for an answer that takes a wrong epoch of this kind for a right one."""

    def when(failure: Failure) -> bool:
        return failure.kind == "wrong" and kind(failure.case) == what and failure.answers[0] == 1

    texts = {
        "same sum": "0 and 3 were read as 1 and 2: the sum is what it was. Add a hash of each number in its place",
        "same squares": "0, 4 and 5 were read as 1, 2 and 6: sums and sums of squares are what they were. Add a hash of"
        " each number",
    }
    return Hint(when, texts[what])


EXERCISES = [
    Exercise(
        name="28.read_once",
        arguments=lambda case, rank: (numbers_read(case)[rank].copy(), case.size),
        expected=lambda case: [int(kind(case) == "nothing")] * case.ranks,
        cases=cases,
        draw=drawing((1, 8), (8, 80)),
        least=lambda case: Least(2 * (case.ranks - 1), 2 * (case.ranks - 1)),
        par=Case(4, 80, 5),
        limits=("bytes",),
        unit="sample",
        hints=(
            Hint(
                lambda f: f.kind == "limit",
                "these are the numbers of the samples, or nearly; a count and a digest are 16 bytes",
            ),
            missed("same sum"),
            missed("same squares"),
            Hint(
                lambda f: f.kind == "wrong" and any(answer != f.answers[0] for answer in f.answers),
                "the ranks give different answers: each of them must add up what all have read",
            ),
            Hint(
                lambda f: f.kind == "wrong",
                "1 when all ranks together have read each of the samples once, and 0 when one was read twice, or by no"
                " rank; a rank may have read none",
            ),
        ),
    )
]
