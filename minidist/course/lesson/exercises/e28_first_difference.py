"""Lesson 28: are the replicas still equal, bit for bit, without sending them?"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Least, drawing


def replicas(case: Case) -> list[np.ndarray]:
    """Return replicas: equal, or with two entries exchanged, or the last bit of one flipped, on one or two ranks."""
    draw = case.generator()
    base = draw.standard_normal(case.size)
    result = [base.copy() for _ in range(case.ranks)]
    if case.size > 1 and case.ranks > 1 and case.seed % 3:
        for rank in draw.choice(case.ranks, min(2, case.ranks - 1), replace=False):
            if case.seed % 3 == 1:
                result[rank][[0, 1]] = result[rank][[1, 0]]  # the sum stays as it was
            else:
                result[rank][-1] = np.nextafter(result[rank][-1], np.inf)
    return result


def truth(case: Case) -> int:
    arrays = replicas(case)
    return next((rank for rank, array in enumerate(arrays) if not np.array_equal(array, arrays[0])), -1)


def cases() -> list[Case]:
    """Return cases with arrays that are longer than a digest."""
    return sorted(Case(ranks, size, seed) for ranks in (1, 2, 3, 5) for size in (8, 40) for seed in range(3)) + [
        Case(8, 100, 4)
    ]


EXERCISES = [
    Exercise(
        name="28.first_difference",
        arguments=lambda case, rank: (replicas(case)[rank],),
        expected=lambda case: [truth(case)] * case.ranks,
        cases=cases,
        draw=drawing((1, 9), (8, 100)),
        least=lambda case: Least(2 * (case.ranks - 1), 2 * (case.ranks - 1)),
        par=Case(4, 100, 1),
        limits=("bytes",),
        unit="weight",
        for_hints={
            "compared_sums": lambda f: f.kind == "wrong" and f.case.seed % 3 == 1 and f.answers[0] == -1,
            "ranks_differ": lambda f: any(answer != f.answers[0] for answer in f.answers),
        },
    )
]
