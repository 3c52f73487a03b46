"""Lesson 10c: the rows of ranks of different speeds, shared by measured times."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, drawing


def counts_of(case: Case) -> list[int]:
    """Return the rows that each rank has computed, at least one."""
    return [1 + int(count) for count in case.generator(case.ranks).integers(0, 5, case.ranks)]


def paces_of(case: Case) -> list[float]:
    """Return the seconds that a row takes on each rank: whole numbers, so that no rounding makes a tie."""
    return (case.generator(case.ranks, 1).permutation(np.arange(case.ranks) % 4) * 2 + 1.0).tolist()


def seconds_of(case: Case) -> list[float]:
    """Return the seconds in which each rank has computed its rows."""
    return [count * pace for count, pace in zip(counts_of(case), paces_of(case), strict=True)]


def one_by_one(rows: int, paces: Sequence[float]) -> list[int]:
    """Return the shares when each row goes to the rank that will have computed it first."""
    shares = [0] * len(paces)
    for _ in range(rows):
        shares[min(range(len(paces)), key=lambda rank: (shares[rank] + 1) * paces[rank])] += 1
    return shares


def slowest(shares: Sequence[int], paces: Sequence[float]) -> float:
    return max(share * pace for share, pace in zip(shares, paces, strict=True))


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    if any(not isinstance(answer, list | tuple | np.ndarray) for answer in answers):
        return "return a list with the number of rows of each rank"
    shares = [[int(n) for n in answer] for answer in answers]
    for rank, mine in enumerate(shares):
        if mine != shares[0]:
            return f"rank 0 shares the rows out as {shares[0]} and rank {rank} as {mine}"
        if len(mine) != case.ranks or sum(mine) != case.size or min(mine) < 0:
            return f"{mine} are not {case.size} rows for {case.ranks} ranks"
    takes, best = slowest(shares[0], paces_of(case)), slowest(one_by_one(case.size, paces_of(case)), paces_of(case))
    if takes > best:
        return (
            f"rows of {paces_of(case)} seconds: with {shares[0]} a step takes {takes:g} seconds, {best:g} are possible"
        )
    return ""


def by_seconds_alone(failure: Failure) -> bool:
    """Return whether the seconds were not divided by the rows that took them."""
    shares = one_by_one(failure.case.size, seconds_of(failure.case))
    return failure.answers_are([np.array(shares)] * failure.case.ranks)


def least(case: Case) -> Least:
    """Return what it takes that every rank knows of every other one."""
    messages = 2 * (case.ranks - 1)
    return Least(messages, messages)


EXERCISES = [
    Exercise(
        name="10c.shares_by_time",
        arguments=lambda case, rank: (case.size, counts_of(case)[rank], seconds_of(case)[rank]),
        check_answers=check_answers,
        cases=lambda: [Case(ranks, rows, seed) for ranks in (1, 2, 3, 4, 6) for rows in (1, 3, 10) for seed in (0, 1)],
        draw=drawing((1, 8), (1, 40)),
        least=least,
        par=Case(4, 10),
        unit="row",
        limits=("bytes",),
    )
]
