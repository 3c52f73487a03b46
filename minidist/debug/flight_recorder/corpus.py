"""Programs that hang, each with its cause: a program that analyses dumps is tried on them, ours first.

Each is a function of a communicator that runs on any number of ranks from 2, and its label says what a diagnosis must
find: which ranks wait, which circle they form, and the rank at which to look first. Those with a number are exhibits of
`minidist museum` in a few lines.

Proved by: tests/flight_recorder/test_corpus.py
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.files import writing
from minidist.base.limits import check_ranks
from minidist.comm import SimWorld
from minidist.core.base.errors import DeadlockError, UsageError
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.debug.flight_recorder.write import write_dumps

MAX_RANKS = 256


@dataclass(frozen=True)
class Label:
    """What a diagnosis must find. waits: ranks that wait. circle: of ranks that wait for each other, () for none.

    suspects: ranks that others wait for and that wait for nothing. difference: the number of the first collective of
    the world that not all ranks have made, None where all have made the same.
    """

    waits: tuple[int, ...]
    circle: tuple[int, ...]
    suspects: tuple[int, ...]
    difference: int | None


@dataclass(frozen=True)
class Case:
    """A program that hangs. label: number of ranks -> what is to be found."""

    cause: str
    program: Callable[[Comm], object]
    label: Callable[[int], Label]
    exhibit: str = ""


def skips_a_collective(comm: Comm) -> None:
    """The last rank has one batch less than the others."""
    array = np.ones(8, np.float32)
    for _ in range(3 - (comm.rank == comm.size - 1)):
        all_reduce(comm, array)


def only_rank_0_saves(comm: Comm) -> None:
    """Saving takes part of all ranks, and stands inside `if rank == 0`."""
    array = np.ones(8, np.float32)
    all_reduce(comm, array)
    if comm.rank == 0:
        all_reduce(comm, array)


def sends_first(comm: Comm) -> None:
    """Every rank of a ring sends before it receives."""
    outgoing, incoming = np.ones(8, np.float32), np.empty(8, np.float32)
    comm.send(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)


def receives_first(comm: Comm) -> None:
    """Every rank of a ring receives before it sends."""
    outgoing, incoming = np.ones(8, np.float32), np.empty(8, np.float32)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    comm.send(outgoing, (comm.rank + 1) % comm.size)


def has_no_partner(comm: Comm) -> None:
    """The last rank waits for a message that rank 0 does not send."""
    array = np.ones(8, np.float32)
    if comm.rank == comm.size - 1:
        comm.recv(array, 0)


def swaps_two_groups(comm: Comm) -> None:
    """Rank 0 calls the collectives of two groups in the other order."""
    first, second, array = comm.dup(), comm.dup(), np.ones(8, np.float32)
    for group in (second, first) if comm.rank == 0 else (first, second):
        all_reduce(group, array)


def mixes_a_message_and_a_collective(comm: Comm) -> None:
    """Rank 1 expects a message of rank 0, which is in a collective with all others."""
    array = np.ones(8, np.float32)
    all_reduce(comm, array)
    if comm.rank == 1:
        comm.recv(array, 0)
    all_reduce(comm, array)


def every(ranks: int) -> tuple[int, ...]:
    """Return all ranks."""
    return tuple(range(ranks))


CASES: dict[str, Case] = {
    "skipped-collective": Case(
        "the last rank makes one all_reduce less and returns",
        skips_a_collective,
        lambda n: Label(every(n - 1), (), (n - 1,), 3),
        "28a",
    ),
    "only-rank-0-saves": Case(
        "rank 0 alone makes a collective that all ranks must make",
        only_rank_0_saves,
        lambda n: Label((0,), (), tuple(range(1, n)), 2),
    ),
    "sends-first": Case(
        "every rank of a ring sends before it receives", sends_first, lambda n: Label(every(n), every(n), (), None)
    ),
    "receives-first": Case(
        "every rank of a ring receives before it sends",
        receives_first,
        lambda n: Label(every(n), (0, *range(n - 1, 0, -1)), (), None),
    ),
    "no-partner": Case(
        "the last rank waits for a message that rank 0 does not send",
        has_no_partner,
        lambda n: Label((n - 1,), (), (0,), None),
        "20b",
    ),
    "swapped-groups": Case(
        "rank 0 calls the collectives of two groups in the other order",
        swaps_two_groups,
        lambda n: Label(every(n), (0, 1), (), None),
    ),
    "message-beside-collective": Case(
        "rank 1 waits for a message of rank 0, which waits in a collective with all others",
        mixes_a_message_and_a_collective,
        lambda n: Label(every(n), (0, 1), (), 2),
    ),
}


def hanging_world(case: Case, ranks: int) -> SimWorld:
    """Run a case on simulated ranks until it hangs; return the world with its record."""
    world = SimWorld(ranks)
    try:
        world.run(case.program)
    except DeadlockError:
        return world
    raise AssertionError(f"{case.cause}: it does not hang on {ranks} ranks")


def write_corpus(folder: str | Path, ranks: Sequence[int] = (2, 4, 8), form: str = "pickle") -> dict[str, Any]:
    """Write the dumps of every case and number of ranks to FOLDER/NAME-RANKS; write and return FOLDER/labels.json."""
    folder = Path(folder)
    labels: dict[str, Any] = {}
    for number in ranks:
        check_ranks(number, most=MAX_RANKS)
        if number < 2:
            raise UsageError(f"--ranks {number}; one rank waits for nobody: at least 2 ranks hang")
    for name, case in CASES.items():
        for number in ranks:
            write_dumps(hanging_world(case, number), folder / f"{name}-{number}", form)
            labels[f"{name}-{number}"] = {
                "cause": case.cause,
                "exhibit": case.exhibit,
                "ranks": number,
                **asdict(case.label(number)),
            }
    with writing("the labels", folder / "labels.json", "make room there, or choose another folder"):
        (folder / "labels.json").write_text(json.dumps(labels, indent=2) + "\n", encoding="utf-8")
    return labels
