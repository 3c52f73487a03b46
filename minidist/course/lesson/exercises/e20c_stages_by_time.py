"""Lesson 20c: stages cut by measured times, on ranks of different speeds."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Least, drawing


def sizes_of(case: Case) -> list[int]:
    """Return the layers that each rank has, at least one."""
    draw = case.generator(case.ranks)
    sizes = np.ones(case.ranks, int)
    np.add.at(sizes, draw.integers(0, case.ranks, case.size - case.ranks), 1)
    return [int(size) for size in sizes]


def flops_of(case: Case) -> np.ndarray:
    return case.generator(case.ranks, 1).integers(1, 10, case.size).astype(float)


def paces_of(case: Case) -> np.ndarray:
    """Return the seconds that one FLOP takes on each rank."""
    return case.generator(case.ranks, 2).permutation(np.arange(case.ranks) % 3 + 1.0)


def own(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds and the FLOPs of the layers of a rank."""
    ends = np.cumsum([0, *sizes_of(case)])
    flops = flops_of(case)[ends[rank] : ends[rank + 1]]
    return flops * paces_of(case)[rank], flops


def slowest(case: Case, sizes: Sequence[int]) -> float:
    ends, flops = np.cumsum([0, *sizes]), flops_of(case)
    return max(float(flops[a:b].sum()) * pace for (a, b), pace in zip(pairwise(ends), paces_of(case), strict=True))


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    if any(not isinstance(answer, list | tuple | np.ndarray) for answer in answers):
        return "return a list with the number of layers of each stage"
    sizes = [[int(n) for n in answer] for answer in answers]
    for rank, mine in enumerate(sizes):
        if mine != sizes[0]:
            return f"rank 0 cuts into {sizes[0]} and rank {rank} into {mine}"
        if len(mine) != case.ranks or sum(mine) != case.size or min(mine) < 1:
            return f"{mine} are not {case.ranks} stages of {case.size} layers, each with at least one"
    every_cut = combinations(range(1, case.size), case.ranks - 1)
    cuts = [np.diff([0, *inner, case.size]).tolist() for inner in every_cut]
    mine_takes, best = slowest(case, sizes[0]), min(slowest(case, cut) for cut in cuts)
    if mine_takes > best:
        return f"with {sizes[0]} the slowest stage takes {mine_takes:g} seconds, {best:g} are possible"
    return ""


def least(case: Case) -> Least:
    """Return what it takes that every rank knows of every other one; as many layers as ranks are cut in one way."""
    messages = 2 * (case.ranks - 1) * (case.size > case.ranks)
    return Least(messages, messages)


EXERCISES = [
    Exercise(
        name="20c.stages_by_time",
        arguments=lambda case, rank: (sizes_of(case), *own(case, rank)),
        check_answers=check_answers,
        cases=lambda: [
            Case(ranks, layers, seed) for ranks in (1, 2, 3, 4) for layers in (ranks, 5, 8) for seed in (0, 1)
        ],
        draw=drawing((1, 4), (4, 9)),
        least=least,
        par=Case(3, 8),
        label=lambda case: f"{case.size} layer{'s' * (case.size != 1)} on {case.ranks} rank{'s' * (case.ranks != 1)}",
        unit="layer",
        limits=("bytes",),
    )
]
