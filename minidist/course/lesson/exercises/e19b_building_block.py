"""Lesson 19b: the building block of a V-shaped schedule, from the offsets that decide its memory."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, drawing

OFFSETS = {"V-Min": (1, 1, 1, 1), "V-Half": (2, 1, 2, 1), "ZB-V": (4, 2, 4, 2)}


def lifetimes(rows: Sequence[Sequence[int]]) -> int:
    """Return how long the two chunks of rank 0 live together, from F to I."""
    f0, f1, i1, i0 = rows[0]
    return i0 - f0 + i1 - f1


def shortest_lifetimes(p: int, offsets: Sequence[int]) -> int:
    """Return the least of `lifetimes` over all waits of 1 to 6 units at the three turns where no two passes collide."""
    way = np.array([[rank, p - 1 - rank, rank, p - 1 - rank] for rank in range(p)]) * offsets
    before = (p - 1) * np.array([0, *np.cumsum(offsets[:3])])  # when a pass starts, without the waits
    found = []
    for waits in product(range(1, 7), repeat=3):
        units = np.sort((way + before + np.array([0, *np.cumsum(waits)])) % 6, axis=1)
        if np.diff(units, axis=1).all():
            found.append((p - 1) * sum(offsets) + sum(waits) + waits[1])  # between F2 and I2 both chunks live
    return min(found)


def _offsets_of(case: Case) -> tuple[int, int, int, int]:
    return list(OFFSETS.values())[case.seed]


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    """Check shape, offsets, the order of the passes, that none collide when repeated, and the lifetimes."""
    rows, offsets = answers[0], _offsets_of(case)
    if rows is None:
        return "the function returned None"
    if not isinstance(rows, list | tuple) or len(rows) != case.size or any(len(row) != 4 for row in rows):
        return f"return one row of four starts for each of the {case.size} ranks"
    for rank, (row, below) in enumerate(pairwise(rows)):
        steps = (below[0] - row[0], row[1] - below[1], below[2] - row[2], row[3] - below[3])
        if steps != offsets:
            return f"from rank {rank} to rank {rank + 1} the four passes are {steps} apart, not {offsets}"
    for rank, row in enumerate(rows):
        if list(row) != sorted(set(row)):
            return f"rank {rank} starts {tuple(row)}, but F1, F2, I2 and I1 follow one another"
    for rank, row in enumerate(rows):
        if len({start % 6 for start in row}) < 4:
            return f"rank {rank} starts {tuple(row)}: repeated every 6 units, two of these fall on the same unit"
    best = shortest_lifetimes(case.size, offsets)
    if lifetimes(rows) > best:
        return f"the chunks of rank 0 live {lifetimes(rows)} units together; {best} are possible"
    return ""


EXERCISES = [
    Exercise(
        name="19b.building_block",
        arguments=lambda case, rank: (case.size, _offsets_of(case)),
        check_answers=check_answers,
        cases=lambda: [Case(1, p, number) for p in range(2, 10) for number in range(len(OFFSETS))],
        draw=drawing((1, 1), (2, 14), (0, len(OFFSETS) - 1)),
        par=Case(1, 4, 1),
        label=lambda case: f"{case.size} rank{'s' * (case.size != 1)}, offsets {_offsets_of(case)}",
        communicates=False,
        written_by_hand=(
            "minidist.core.pipeline.plan",
            "minidist.core.pipeline.schedules",
            "minidist.pipeline.schedules",
        ),
    )
]
