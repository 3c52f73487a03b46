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
    """A program that hangs. label: number of ranks -> what is to be found. exhibit: of the museum, "" for none."""

    program: Callable[[Comm], object]
    label: Callable[[int], Label]
    exhibit: str = ""

    @property
    def cause(self) -> str:
        """Why it hangs: the docstring of its program."""
        text = (self.program.__doc__ or "").rstrip(".")
        return text[:1].lower() + text[1:]


CASES: dict[str, Case] = {}


def case(name: str, label: Callable[[int], Label], exhibit: str = "") -> Callable[[Callable[[Comm], object]], None]:
    """Enter a program, whose docstring is its cause, into CASES."""
    return lambda program: CASES.update({name: Case(program, label, exhibit)})


def every(ranks: int) -> tuple[int, ...]:
    """Return all ranks."""
    return tuple(range(ranks))


@case("skipped-collective", lambda n: Label(every(n - 1), (), (n - 1,), 3), "28a")
def skips_a_collective(comm: Comm) -> None:
    """The last rank makes one all_reduce less and returns."""
    array = np.ones(8, np.float32)
    for _ in range(3 - (comm.rank == comm.size - 1)):
        all_reduce(comm, array)


@case("only-rank-0-saves", lambda n: Label((0,), (), tuple(range(1, n)), 2))
def only_rank_0_saves(comm: Comm) -> None:
    """Rank 0 alone makes a collective that all ranks must make."""
    array = np.ones(8, np.float32)
    all_reduce(comm, array)
    if comm.rank == 0:
        all_reduce(comm, array)


@case("sends-first", lambda n: Label(every(n), every(n), (), None))
def sends_first(comm: Comm) -> None:
    """Every rank of a ring sends before it receives."""
    outgoing, incoming = np.ones(8, np.float32), np.empty(8, np.float32)
    comm.send(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)


@case("receives-first", lambda n: Label(every(n), (0, *range(n - 1, 0, -1)), (), None))
def receives_first(comm: Comm) -> None:
    """Every rank of a ring receives before it sends."""
    outgoing, incoming = np.ones(8, np.float32), np.empty(8, np.float32)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    comm.send(outgoing, (comm.rank + 1) % comm.size)


@case("no-partner", lambda n: Label((n - 1,), (), (0,), None), "20b")
def has_no_partner(comm: Comm) -> None:
    """The last rank waits for a message that rank 0 does not send."""
    array = np.ones(8, np.float32)
    if comm.rank == comm.size - 1:
        comm.recv(array, 0)


@case("swapped-groups", lambda n: Label(every(n), (0, 1), (), None))
def swaps_two_groups(comm: Comm) -> None:
    """Rank 0 calls the collectives of two groups in the other order."""
    first, second, array = comm.dup(), comm.dup(), np.ones(8, np.float32)
    for group in (second, first) if comm.rank == 0 else (first, second):
        all_reduce(group, array)


@case("message-beside-collective", lambda n: Label(every(n), (0, 1), (), 2))
def mixes_a_message_and_a_collective(comm: Comm) -> None:
    """Rank 1 waits for a message of rank 0, which waits in a collective with all others."""
    array = np.ones(8, np.float32)
    all_reduce(comm, array)
    if comm.rank == 1:
        comm.recv(array, 0)
    all_reduce(comm, array)


def hanging_world(case: Case, ranks: int) -> SimWorld:
    """Run a case on simulated ranks until it hangs; return the world with its record.

    AssertionError for a case that ends.
    """
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
