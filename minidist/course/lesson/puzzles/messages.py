"""The row of messages: m01 to m20."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm.errors import BufferReuseError
from minidist.course.lesson.exercise import Case, Failure, Least, summed
from minidist.course.lesson.puzzles import MESSAGES, Item, own_exercises, puzzles_of

NOTE = (
    "This is rank comm.rank of comm.size; comm.send(array, to) and comm.recv(array, source) wait for each other, and an"
    " element has 8 B."
)


def data(case: Case, rank: int) -> np.ndarray:
    """Return 10 r + 1, 10 r + 2, ...: the numbers show from which rank they came."""
    return 10.0 * rank + 1 + np.arange(case.size)


def own(case: Case, rank: int) -> tuple[np.ndarray]:
    """Return what a rank gets: its array."""
    return (data(case, rank),)


def table_of(case: Case, rank: int) -> tuple[np.ndarray]:
    """Return the rows of all ranks on rank 0, and zeros elsewhere."""
    rows = np.array([data(case, other) for other in range(case.ranks)])
    return (rows if rank == 0 else np.zeros_like(rows),)


def from_rank(source: Callable[[int, int], int]) -> Callable[[Case], Sequence[np.ndarray]]:
    """Return answers: the array of rank `source(rank, ranks)` on each rank."""
    return lambda case: [data(case, source(rank, case.ranks)) for rank in range(case.ranks)]


def each_number(messages: Callable[[Case], int], part: int = 1) -> Callable[[Case], Least]:
    """Return the least of messages(case) messages, each with a rank's array or 1/part of it."""
    return lambda case: Least(messages(case), 8 * messages(case) * (case.size // part))


def sums(case: Case) -> list[np.ndarray]:
    """Return the sum of the arrays of ranks 0 to r, for each rank r."""
    return list(np.cumsum([data(case, rank) for rank in range(case.ranks)], axis=0))


def half_of_rank_0(case: Case) -> list[np.ndarray]:
    """Return the arrays of two ranks, with the first half of rank 0's at the beginning of both."""
    first, second = data(case, 0), data(case, 1)
    return [first, np.concatenate([first[: case.size // 2], second[case.size // 2 :]])]


def rows(case: Case, *from_first: int) -> np.ndarray:
    """Return all rows as a table; those of the ranks `from_first` are filled, or all."""
    (table,) = table_of(case, 0)
    kept = list(from_first or range(case.ranks))
    return np.where(np.isin(np.arange(case.ranks), kept)[:, None], table, 0.0)


def two_rows(case: Case) -> list[np.ndarray]:
    """Return the table with a rank's own row and that of the rank before it."""
    return [rows(case, rank, (rank - 1) % case.ranks) for rank in range(case.ranks)]


unchanged = from_rank(lambda rank, n: rank)
# What every rank returns, by its name in messages.toml.
ANSWERS: dict[str, Callable[[Case], Sequence[np.ndarray]]] = {
    "everyone": from_rank(lambda rank, n: 0),
    "unchanged": unchanged,
    "swapped": from_rank(lambda rank, n: 1 - rank),
    "from_rank_1": from_rank(lambda rank, n: 1),
    "from_the_last": from_rank(lambda rank, n: n - 1),
    "from_two_to_the_left": from_rank(lambda rank, n: (rank - 2) % n),
    "from_two_to_the_right": from_rank(lambda rank, n: (rank + 2) % n),
    "doubled": lambda case: [2 * data(case, 0)] * 2,
    "half_of_rank_0": half_of_rank_0,
    "sums": sums,
    "sum_everywhere": lambda case: [sums(case)[-1]] * case.ranks,
    "sum_on_rank_0": lambda case: [sums(case)[-1], *unchanged(case)[1:]],
    "table_everywhere": lambda case: [rows(case)] * case.ranks,
    "table_on_rank_0": lambda case: [rows(case), *unchanged(case)[1:]],
    "first_row_on_rank_0": lambda case: [rows(case, 0), *unchanged(case)[1:]],
    "two_rows": two_rows,
}
# The least that must be sent, by its name in messages.toml.
LEAST: dict[str, Callable[[Case], Least]] = {
    "others": each_number(lambda case: case.ranks - 1),
    "one_from_each": each_number(lambda case: case.ranks),
    "all_to_all": each_number(lambda case: case.ranks * (case.ranks - 1)),
    "two_messages": each_number(lambda case: 2),
    "half_a_message": each_number(lambda case: 1, part=2),
    "summed_once": lambda case: summed(case.ranks, 1, case.size),
    "summed_everywhere": lambda case: summed(case.ranks, case.ranks, case.size),
}


def row_is_missing(failure: Failure) -> bool:
    return "expected" in failure.message or failure.raised(BufferReuseError)


def message(item: Item) -> dict[str, Any]:
    """Return the settings of a puzzle whose ranks get an array each; the target is messages and their bytes."""
    return {
        "arguments": {"own": own, "table_of": table_of}[item.get("arguments", "own")],
        "expected": ANSWERS[item["expected"]],
        "least": LEAST[item["least"]],
        "limits": tuple(item.get("limits", MESSAGES)),
        "forbidden": tuple(item.get("forbidden", ())),
        "note": NOTE,
    }


PUZZLES = puzzles_of("messages", {**ANSWERS, "row_is_missing": row_is_missing}, {"message": message})
EXERCISES = own_exercises(PUZZLES)
