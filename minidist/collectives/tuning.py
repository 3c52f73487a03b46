"""Measured times of the algorithms of a collective. Under MPI `algorithm="auto"` chooses by them.

A formula of alpha and beta describes messages on an idle link. Real ranks also copy and add, share memory and cores
with each other, and wait for the scheduler, so the best algorithm by the formula may be several times slower than the
fastest one. Therefore the first call of an operation with `algorithm="auto"` measures a table:

    seconds              4 KiB    16 KiB   ...   64 MiB       Arrays are float32. The slowest rank's time counts.
    ordered              2.2e-5   2.9e-5         2.5e-2       Between two sizes the time is interpolated linearly.
    recursive_doubling   6.0e-6   1.0e-5         1.8e-2
    ...

On a busy machine one call may take many times as long as the next, and for a while all of them take longer. So each
round calls every algorithm, the median of an algorithm's shares of the rounds' times counts, and the rounds of a size
are spread over the whole measurement:

    visit 1   4 KiB: 3 to 100 rounds   16 KiB: 3 to 100 rounds   ...   64 MiB: 3 rounds
    visit 2   4 KiB: 3 to 100 rounds   16 KiB: ...                     VISITS times, as far as there is time
    visit 3   ...

The algorithm that was chosen for the size before (for the first size the formulas' choice) is chosen again, unless
the median of another one is lower by more than 5 %. An algorithm that is clearly slower than the best one is not called
any more, which leaves the time to the others. Where not even 3 rounds fit into a visit's share of the time, an
algorithm is not called at all if it took at least twice as long as the best one at the size before, and its ratio to
the best one grew by 5 % or more there. (The ratio of two times of the form a + b * bytes is monotonic in the bytes.)

This takes about BUDGET seconds. Sizes for which there is no time are left out: their times are extrapolated from the
last two sizes, and where only one was measured, formulas choose. Rank 0 reports the measurement in one line and stores
the table in the user's cache directory (see `base.cache`). Its key has all that the times depend on: the hosts of the
ranks in order, the nodes, the MPI library with its version, the variables that choose its transport, the number of
cores, and whether messages are checked.

In later runs rank 0 reads the table and sends it to the other ranks. So all ranks choose the same algorithm, whatever
is on their disks, and every run with the same table chooses as the run before. The environment variable
MINIDIST_TUNING of rank 0 is `refresh` to measure again, or `off` to choose by formulas, as simulated ranks do. A job
measures again only with `refresh`, because with another algorithm the sums of a resumed run would have other bits.
`minidist bench collectives` measures again when an algorithm that the table chose is slower than another one.

Only communicators of all ranks are measured. Two groups that hold copies of the same parameters could not agree on a
table without messages between the groups, and sums in different orders would let the copies drift apart.

Proved by: tests/collectives/test_tuning.py
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from minidist import __version__
from minidist.base.cache import folder, key_of, read_entry, write_entry
from minidist.base.errors import UsageError, quoted
from minidist.base.process import usable_cores
from minidist.collectives.algorithms import ALGORITHMS, Call, candidates
from minidist.collectives.closed_forms import seconds
from minidist.comm.mpi.world import MPIWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives.calls import Algorithm
from minidist.core.comm.communicator import Comm

new_purpose("tuning")

SIZES = tuple(4**k << 10 for k in range(1, 9))  # bytes: 4 KiB to 64 MiB
VISITS = 3  # of each size
LEAST_ROUNDS, MOST_ROUNDS = 3, 100  # of each visit
CALLS = 4  # in a row, where there is time
BUDGET = 3.0  # seconds
VERSION = 4  # of what is measured, and how
CHECKED = 10  # rounds after which algorithms that are clearly slower are left out
EQUAL, SLOWER, FAR = 1.05, 1.25, 2.0  # ratios of times: equal within noise, clearly slower, slower by far
MEASURE, FORMULAS = -1.0, -2.0  # sent in place of seconds: there is no table; no table is to be used

# Variables that choose how messages travel: of UCX, libfabric, MPICH and Open MPI.
TRANSPORT = ("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD", "OMPI_MCA_btl", "OMPI_MCA_pml")


class MeasuredTimes:
    """The table of one operation. seconds: a row per algorithm, a column per size; inf where it was not measured."""

    def __init__(self, names: Sequence[str], seconds: np.ndarray) -> None:
        self.names, self.seconds = names, seconds
        self.columns = int(np.isfinite(seconds[0]).sum())

    def fastest(self, nbytes: int) -> str | None:
        """Return the algorithm with the least time; of equal ones the first.

        Arrays shorter than the first of SIZES have the choice of that size. For arrays longer than the last one that
        was measured the times go on as between the last two. There is no choice, and None, if only one was measured.
        """
        sizes = SIZES[: self.columns]
        if nbytes <= sizes[-1]:
            times = [float(np.interp(nbytes, sizes, row[: self.columns])) for row in self.seconds]
        elif self.columns > 1:
            before, last = self.seconds[:, self.columns - 2 : self.columns].T
            growth = np.maximum(last - before, 0.0) / (sizes[-1] - sizes[-2])
            times = list(last + growth * (nbytes - sizes[-1]))
        else:
            return None
        return self.names[times.index(min(times))]

    def __str__(self) -> str:
        """The fastest algorithm and the sizes for which it is: "recursive_doubling to 64 KiB, ring from there"."""
        fastest = [self.names[row] for row in self.seconds[:, : self.columns].argmin(axis=0)]
        ends = [i for i in range(len(fastest)) if i + 1 == len(fastest) or fastest[i + 1] != fastest[i]]
        parts = [f"{fastest[i]} to {_size(SIZES[i])}" for i in ends]
        if self.columns == 1:
            return f"{parts[0]}, then by formula"
        parts[-1] = f"{fastest[-1]} from there" if len(parts) > 1 else f"{fastest[-1]} for all sizes"
        return ", ".join(parts)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def entry_of(operation: str, hosts: Sequence[str], library: str, **conditions: Any) -> Path:
    """Return the path of a table. hosts: the host of each rank. conditions: what else the times depend on."""
    environment = {name: os.environ[name] for name in TRANSPORT if name in os.environ}
    key = key_of(
        " ".join(hosts),
        "tuning",
        VERSION,
        operation=operation,
        algorithms=list(candidates(operation)),
        software=[__version__, np.__version__, library],
        environment=environment,
        cores=len(usable_cores()),
        **conditions,
    )
    return folder() / f"tuning-{key}.npy"


def kept_times(place: Path, operation: str) -> MeasuredTimes | None:
    """Return the table stored at `place`, a path of `entry_of`, or None if there is none."""
    names, kept = list(candidates(operation)), read_entry(place)
    return None if kept is None or kept.shape != (len(names), len(SIZES)) else MeasuredTimes(names, np.array(kept))


def measured_times(comm: Comm, world: MPIWorld, operation: str, anew: bool = False) -> MeasuredTimes | None:
    """Return the table of `operation` for all ranks of `world`, or None with MINIDIST_TUNING=off. Collective.

    anew: measure also where there is a table, as MINIDIST_TUNING=refresh does.

    Everything is sent with purpose `tuning`. Rank 0 sends the table that it read, 8 B per algorithm and size, to every
    other rank. If there is none, the ranks measure: a round calls each algorithm 1 or CALLS times after a barrier, and
    ends with an all-reduce of 8 B per algorithm and another 8 B. Raises UsageError for another MINIDIST_TUNING.
    """
    algorithms, place = candidates(operation), None
    table = np.full((len(algorithms), len(SIZES)), MEASURE)
    if comm.rank == 0:
        # The code of a user's algorithm may have changed since the last run, so its times are never stored.
        if not any(entry.is_users for entry in algorithms.values()):
            place = entry_of(
                operation,
                [world.hosts[member] for member in comm.members],
                world.MPI.Get_library_version(),
                nodes=comm.nodes,
                checks=world.checks,
                synchronous=world.synchronous,
            )
        setting = os.environ.get("MINIDIST_TUNING", "")
        if setting not in ("", "refresh", "off"):
            raise UsageError(
                f"MINIDIST_TUNING={quoted(setting)}; use refresh to measure the collectives anew, or off to choose"
                " their algorithms by formulas"
            )
        setting = "refresh" if anew and setting == "" else setting
        kept = kept_times(place, operation) if place is not None and setting == "" else None
        table = kept.seconds if kept is not None else np.full_like(table, FORMULAS if setting == "off" else MEASURE)

    with purpose("tuning", whole=True):
        broadcast = comm.collective("broadcast/naive tuning", root=0)
        ALGORITHMS["broadcast"]["naive"].run(broadcast, table, 0)
        if table[0, 0] == MEASURE:
            began = time.perf_counter()
            table = _measure(comm, operation, algorithms)
            if comm.rank == 0:
                _keep(place, table, f"{operation} on {world.size} ranks", time.perf_counter() - began)
    return None if table[0, 0] == FORMULAS else MeasuredTimes(list(algorithms), table)


def _keep(place: Path | None, table: np.ndarray, what: str, seconds: float) -> None:
    """Store a measured table where the next run looks for it, and report the measurement on standard error."""
    where = "for this run, because an algorithm is the user's"
    if place is not None:
        where = f"kept in {place}"
        try:
            write_entry(place, table)
        except OSError as error:
            where = f"for this run: {place} cannot be written ({error.strerror}); set MINIDIST_CACHE"
    print(f'minidist: measured {what} for algorithm="auto" in {seconds:.1f} s, {where}', file=sys.stderr, flush=True)


@dataclass
class _Measurement:
    """The measurement of one size.

    called: which algorithms the next round calls. seconds: of a call of each algorithm, expected or the median that was
    measured. rounds: the seconds of each algorithm in each round, on the slowest rank; NaN where it was not called.
    """

    called: np.ndarray
    seconds: np.ndarray
    rounds: list[np.ndarray] = field(default_factory=list)

    @property
    def ratios(self) -> np.ndarray:
        """The time of each algorithm divided by that of the best one."""
        scores, best, _ = _scores(np.array(self.rounds))
        ratios: np.ndarray = scores / scores[best]
        return ratios


def _measure(comm: Comm, operation: str, algorithms: Mapping[str, Algorithm]) -> np.ndarray:
    """Measure and return the seconds of each algorithm at each size; all ranks return the same table. Collective."""
    began, elapsed, done = time.perf_counter(), 0.0, list[_Measurement]()
    for turn in range(VISITS):
        for column, nbytes in enumerate(SIZES):
            of_size = done[column] if column < len(done) else _next_size(done, len(algorithms))

            # The sizes end where there is no time for the uncounted round and LEAST_ROUNDS others, of one call each.
            if elapsed + (LEAST_ROUNDS + 1) * of_size.seconds[of_size.called].sum() > BUDGET:
                break
            if column == len(done):
                done.append(of_size)
            until = began + _share() * (turn * len(SIZES) + column + 1)
            elapsed = _visit(comm, operation, algorithms, of_size, nbytes, until) - began

    # Choose for one size after the other. An algorithm that was not called keeps its ratio to the best one.
    table, incumbent = np.full((len(algorithms), len(SIZES)), inf), _usual(operation, comm.size)
    for column, of_size in enumerate(done):
        times, incumbent = _judged(np.array(of_size.rounds), incumbent)
        table[:, column] = times
        if column:
            before = table[:, column - 1] / table[:, column - 1].min()
            table[:, column] = np.where(np.isnan(times), times[incumbent] * before, times)
    return table


def _share() -> float:
    """Return the seconds of one visit to a size."""
    return BUDGET / (VISITS * len(SIZES))


def _next_size(done: Sequence[_Measurement], algorithms: int) -> _Measurement:
    """Return the measurement of the next size. A call is expected to take four times as long as at the last one."""
    seconds = 4 * done[-1].seconds if done else np.zeros(algorithms)
    if len(done) < 2 or (LEAST_ROUNDS + 1) * seconds.sum() < _share():
        return _Measurement(np.ones(algorithms, bool), seconds)
    last, before = done[-1].ratios, done[-2].ratios
    return _Measurement((last < FAR) | (last < EQUAL * before), seconds)


def _visit(
    comm: Comm, operation: str, algorithms: Mapping[str, Algorithm], of_size: _Measurement, nbytes: int, until: float
) -> float:
    """Measure LEAST_ROUNDS to MOST_ROUNDS rounds of one size, and return when the last one ends. Collective.

    until: the time after which no further round begins.
    """
    # `np.full` writes to the arrays, so that their pages exist before the first call.
    call = Call.of_size(operation, comm.size, nbytes // 4)
    arguments = call.arguments(comm.rank, lambda size: np.full(size, 0.0, np.float32))
    entries, calls = list(algorithms.items()), 1

    # Each round ends with a maximum over ranks: of the times, and of the seconds that have passed since `until`. So all
    # ranks stop after the same round. The first round, which opens connections and loads caches, is not counted; it
    # shows whether there is time for several calls in a row. Odd rounds go backwards, so that no algorithm always
    # follows the same one.
    for number in range(MOST_ROUNDS + 1):
        agreed = np.full(len(entries) + 1, np.nan)
        for row in np.flatnonzero(of_size.called)[:: -1 if number % 2 else 1]:
            name, entry = entries[row]
            run = partial(_call, comm, f"{operation}/{name}", entry.run, arguments)
            agreed[row] = _seconds(comm, run, calls)
        agreed[-1] = time.perf_counter() - until
        doubling = comm.collective("all_reduce/recursive_doubling max tuning")
        ALGORITHMS["all_reduce"]["recursive_doubling"].run(doubling, agreed, "max")
        if number == 0:
            total = agreed[:-1][of_size.called].sum()
            calls = CALLS if LEAST_ROUNDS * CALLS * total < _share() else 1
            continue
        of_size.rounds.append(agreed[:-1])
        if number % LEAST_ROUNDS == 0:
            of_size.called &= ~_clearly_slower(np.array(of_size.rounds))
        if number >= LEAST_ROUNDS and agreed[-1] > 0:
            break
    of_size.seconds = _medians(np.array(of_size.rounds))
    return until + float(agreed[-1])


def _medians(rounds: np.ndarray) -> np.ndarray:
    """Return the median of each column; NaN of an algorithm that was never called."""
    called = ~np.isnan(rounds[0])
    medians = np.full(len(called), np.nan)
    medians[called] = np.nanmedian(rounds[:, called], axis=0)
    return medians


def _scores(rounds: np.ndarray) -> tuple[np.ndarray, int, float]:
    """Return the median of each algorithm's share of a round's time, the algorithm with the least, and a round's time.

    rounds: seconds, a row per round and a column per algorithm; NaN from the round on in which it was left out. The
    share of an algorithm that was never called is NaN. The time of a round is the geometric mean of the algorithms that
    were called in all rounds.
    """
    always = ~np.isnan(rounds[-1])
    times = np.exp(np.log(rounds[:, always]).mean(axis=1))
    scores = _medians(rounds / times[:, None])
    return scores, int(np.where(always, scores, inf).argmin()), float(np.median(times))


def _lead(rounds: np.ndarray, first: int) -> np.ndarray:
    """Return by how much the first algorithm is ahead of each, by a sign test: above 1 it is clearly faster.

    The rounds in which it is faster minus those in which it is slower, divided by twice the standard deviation that
    this difference has for equal algorithms.
    """
    differences = rounds - rounds[:, first : first + 1]
    wins, losses = (differences > 0).sum(axis=0), (differences < 0).sum(axis=0)
    lead: np.ndarray = (wins - losses) / (2 * np.sqrt(np.maximum(wins + losses, 1)))
    return lead


def _clearly_slower(rounds: np.ndarray) -> np.ndarray:
    """Return which algorithms are clearly slower than the best one, and take more than SLOWER times as long.

    At least CHECKED rounds show this; four are enough for an algorithm that takes more than FAR times as long in each.
    """
    scores, best, _ = _scores(rounds)
    clearly: np.ndarray = (_lead(rounds, best) > 1) & (scores > SLOWER * scores[best]) & (len(rounds) >= CHECKED)
    by_far = (rounds > FAR * rounds[:, best : best + 1]).all(axis=0) & (len(rounds) > 3)
    return clearly | by_far


def _judged(rounds: np.ndarray, incumbent: int) -> tuple[np.ndarray, int]:
    """Return the seconds of each algorithm in these rounds, and which one is chosen: the one with the least.

    incumbent: that of the size before. It is chosen again unless it was left out, or takes more than EQUAL times as
    long as the best one. An algorithm that was never called has NaN seconds.
    """
    scores, taken, time_of_round = _scores(rounds)
    if not np.isnan(rounds[-1, incumbent]) and scores[incumbent] <= EQUAL * scores[taken]:
        taken = incumbent

    # An algorithm that seems faster than the chosen one gets a slightly longer time, so that the table says the choice.
    result = np.maximum(scores, scores[taken] * (1 + 1e-6))
    result[taken] = scores[taken]
    return time_of_round * result, taken


def _usual(operation: str, ranks: int) -> int:
    """Return the row of the formulas' choice for the shortest arrays, on links of the default cost."""
    links = LinkModel()
    names = list(candidates(operation))
    costs = [seconds(operation, name, SIZES[0], ranks, links.alpha, links.beta, links.overhead) for name in names]
    return costs.index(min(costs))


def _call(comm: Comm, name: str, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    run(comm.collective(name), *arguments)


def _seconds(comm: Comm, call: Callable[[], None], calls: int) -> float:
    """Return this rank's mean time of some calls in a row, which begin after a barrier."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
