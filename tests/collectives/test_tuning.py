"""Measured times of collectives: one table for all ranks, kept for the next run; what is sent, and what is chosen."""

from collections import Counter
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.collectives import algorithm, auto, tuning
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.closed_forms import volume
from minidist.collectives.tuning import SIZES, MeasuredTimes, candidates, entry_of, kept_times, measured_times
from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce, ring
from tests.cases import each

NAMES = list(candidates("all_reduce"))


def table(*fastest):
    """A table in which these algorithms are the fastest of their sizes; inf for the sizes that are left."""
    seconds = np.full((len(NAMES), len(SIZES)), inf)
    for column, name in enumerate(fastest):
        seconds[:, column] = [1e-3 * (column + 1) if row == name else 1.0 for row in NAMES]
    return seconds


def pretended(monkeypatch, tmp_path, ranks, hosts=None, library="MPICH 5"):
    """What `measured_times` needs of an MPI world, so that simulated ranks may be measured; a separate cache."""
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_TUNING", raising=False)
    MPI = SimpleNamespace(Get_library_version=lambda: library)
    return SimpleNamespace(size=ranks, hosts=hosts or ["node0"] * ranks, MPI=MPI, checks=True, synchronous=False)


def bytes_of(operation, name, elements, ranks, rank):
    """The bytes that leave a rank in one call on float32, in closed form."""
    options = {"itemsize": 4} if name in ("ring_in_blocks", "segmented_ring") else {}
    return 4 * volume(operation, name, elements, ranks, rank, **options).elements


def run(ranks, world, operation="all_reduce", **settings):
    """Return the tables of all ranks, and the bytes that each rank sent to find them."""
    simulated = SimWorld(ranks)
    found = simulated.run(lambda comm: measured_times(comm, world, operation, **settings))
    sent = [trace.bytes_by_purpose() for trace in simulated.traces]
    assert all(set(purposes) <= {"tuning"} for purposes in sent)
    return found, [purposes.get("tuning", 0) for purposes in sent]


def test_the_least_time_is_chosen_and_sizes_that_were_not_measured_are_left_to_the_formulas():
    times = MeasuredTimes(NAMES, table("naive"))
    assert [times.fastest(n) for n in (1, SIZES[0])] == ["naive", "naive"]
    assert times.fastest(SIZES[0] + 1) is None
    assert str(times) == "naive to 4 KiB, then by formula"

    times = MeasuredTimes(NAMES, table("naive", "ring", "ring"))
    assert [times.fastest(n) for n in (1, SIZES[0], SIZES[1], SIZES[2])] == ["naive", "naive", "ring", "ring"]
    assert str(times) == "naive to 4 KiB, ring from there"

    # Between two sizes straight lines: naive 1e-3 -> 1, ring 1 -> 2e-3 cross just above the middle.
    middle = (SIZES[0] + SIZES[1]) // 2
    assert (times.fastest(middle - 50), times.fastest(middle + 50)) == ("naive", "ring")

    # Longer arrays: the ring takes 2 s and 3 s, all others 1 s and 2.5 s, at 16 and 64 KiB. The lines do not meet
    # between these sizes, but at 112 KiB: 1 + 1.5 x = 2 + x has x = 2, twice 48 KiB above 16 KiB.
    lines = table("naive", "naive", "naive")
    lines[:, 1:3] = [(2.0, 3.0) if row == "ring" else (1.0, 2.5) for row in NAMES]
    lines = MeasuredTimes(NAMES, lines)
    assert [lines.fastest(n) for n in (SIZES[2], 111 << 10, 113 << 10, 1 << 40)] == [NAMES[0], NAMES[0], "ring", "ring"]

    # A time that falls with the size is noise: it stays as it is.
    falling = table("naive", "naive")
    falling[:, :2] = [(9.0, 1.0) if row == "ring" else (0.5, 0.5) for row in NAMES]
    assert MeasuredTimes(NAMES, falling).fastest(1 << 40) == NAMES[0]


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all", "scatter"])
def test_one_table_for_all_ranks_and_every_byte_counted(operation, monkeypatch, tmp_path):
    """Broadcast what rank 0 has; then per size and round each algorithm, and the all-reduce of the times."""
    ranks, rounds = 3, 3
    monkeypatch.setattr(tuning, "SIZES", SIZES[:2])
    monkeypatch.setattr(tuning, "MOST_ROUNDS", rounds)
    monkeypatch.setattr(tuning, "BUDGET", inf)
    for ratio in ("SLOWER", "FAR"):
        monkeypatch.setattr(tuning, ratio, inf)  # every algorithm is called in every round
    found, sent = run(ranks, pretended(monkeypatch, tmp_path, ranks), operation)
    names = list(candidates(operation))
    for times in found:
        assert np.array_equal(times.seconds, found[0].seconds)
        assert (times.columns, np.isfinite(times.seconds).all(), (times.seconds > 0).all()) == (2, True, True)
    for rank in range(ranks):
        expected = 8 * len(names) * 2 * volume("broadcast", "naive", 1, ranks, rank).elements
        for size in SIZES[:2]:
            elements = -(-(size // 4) // ranks) * ranks if operation == "all_to_all" else size // 4
            for name in names:
                calls = tuning.VISITS * (1 + rounds * tuning.CALLS)
                expected += calls * bytes_of(operation, name, elements, ranks, rank)
            doubling = volume("all_reduce", "recursive_doubling", len(names) + 1, ranks, rank)
            expected += tuning.VISITS * (1 + rounds) * 8 * doubling.elements
        assert sent[rank] == expected, rank


def on_a_busy_machine(seed, true, spread):
    """A clock in place of `_seconds`: true times, a load that drifts for all, and a spread for each call.

    Now and then a call waits for another process, for many times as long as it takes.
    """
    draws = np.random.default_rng(seed)
    load = [1.0]

    def seconds(comm, call, calls):
        name = call.args[1].partition("/")[2]
        nbytes = sum(a.nbytes for a in call.args[3] if isinstance(a, np.ndarray))
        load[0] = min(4.0, max(1.0, load[0] * draws.lognormal(0.0, 0.1)))
        waits = 20.0 if draws.random() < 0.15 else 1.0
        return true[name][nbytes] * load[0] * waits * draws.lognormal(0.0, spread)

    return seconds


@each(("spread", "allowed"), [(0.05, 0), (0.2, 3)])
def test_on_a_busy_machine_the_choice_is_within_a_tenth_of_the_best(spread, allowed, monkeypatch):
    """The true times are known, because the clock is not real. Where calls vary, 3 of 112 choices may be worse."""
    monkeypatch.setattr(tuning, "BUDGET", inf)
    monkeypatch.setattr(tuning, "MOST_ROUNDS", 33)
    further = []
    for seed in range(14):
        times = np.random.default_rng(seed).uniform(1.0, 3.0, (len(NAMES), len(SIZES)))
        true = {name: dict(zip(SIZES, row, strict=True)) for name, row in zip(NAMES, times, strict=True)}
        monkeypatch.setattr(tuning, "_seconds", on_a_busy_machine(seed, true, spread))
        measured = SimWorld(1).run(tuning._measure, "all_reduce", candidates("all_reduce"))[0]
        for nbytes, best in zip(SIZES, times.min(axis=0), strict=True):
            chosen = MeasuredTimes(NAMES, measured).fastest(nbytes)
            assert true[chosen][nbytes] <= 1.25 * best, (seed, nbytes, chosen)
            if true[chosen][nbytes] > 1.10 * best:
                further.append((seed, nbytes, chosen))
    assert len(further) <= allowed, further


def test_equal_algorithms_do_not_take_turns(monkeypatch):
    """Within noise the algorithm of the size before stays, so all sizes have the same one."""
    monkeypatch.setattr(tuning, "BUDGET", inf)
    true = {name: dict.fromkeys(SIZES, 1.0 if name in ("ring", "rabenseifner") else 2.0) for name in NAMES}
    monkeypatch.setattr(tuning, "_seconds", on_a_busy_machine(1, true, 0.05))
    measured = SimWorld(1).run(tuning._measure, "all_reduce", candidates("all_reduce"))[0]
    assert len({MeasuredTimes(NAMES, measured).fastest(nbytes) for nbytes in SIZES}) == 1


def columns_of(monkeypatch, seconds_of):
    """The sizes that are measured where call number i of a size takes seconds_of(i, nbytes) by a clock that says 0."""
    monkeypatch.setattr(tuning, "MOST_ROUNDS", 3)
    called = Counter()

    def seconds(comm, call, calls):
        nbytes = call.args[3][0].nbytes
        called[nbytes] += 1
        return seconds_of(called[nbytes], nbytes)

    monkeypatch.setattr(tuning, "_seconds", seconds)
    measured = SimWorld(1).run(tuning._measure, "all_reduce", candidates("all_reduce"))[0]
    return MeasuredTimes(NAMES, measured).columns


def test_a_size_is_left_out_when_its_calls_are_expected_to_take_too_long(monkeypatch):
    """Those of 256 KiB take 0.05 s, so those of 1 MiB should take 0.2 s: 4 rounds of 9 calls do not fit into 3 s.

    One call that is delayed, in the last round of a visit, says nothing of the next size. Where three rounds are
    delayed, and no later one, the third visit goes on with the size at which the first one ended.
    """
    visit = 4 * len(NAMES)
    assert columns_of(monkeypatch, lambda number, nbytes: 0.05 if nbytes == SIZES[3] else 1e-3) == 4
    assert columns_of(monkeypatch, lambda number, nbytes: 0.015 if nbytes == SIZES[3] else 1e-3) == len(SIZES)
    for delayed in (visit - len(NAMES) + 1, visit):
        assert columns_of(monkeypatch, lambda number, nbytes, at=delayed: 0.2 if number == at else 1e-3) == len(SIZES)
    first = range(1, visit + 1)
    assert columns_of(monkeypatch, lambda i, nbytes: 0.05 if nbytes == SIZES[3] and i in first else 1e-3) == len(SIZES)


def test_a_visit_ends_at_its_share_of_the_time(monkeypatch):
    """A call takes a second of this clock, and a visit has 200 seconds: 22 rounds of 9 calls, where 100 are allowed."""
    now, called = [0.0], Counter()
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(tuning, "BUDGET", 200.0 * tuning.VISITS * len(SIZES))

    def seconds(comm, call, calls):
        now[0] += 1.0
        called[call.args[3][0].nbytes] += 1
        return 1.0

    monkeypatch.setattr(tuning, "_seconds", seconds)
    SimWorld(1).run(tuning._measure, "all_reduce", candidates("all_reduce"))
    assert list(called) == list(SIZES)
    # A visit ends with a whole round.
    assert all(abs(calls - 3 * 200) <= 3 * len(NAMES) for calls in called.values()), called


def test_an_algorithm_is_left_out_when_it_is_clearly_slower():
    """It takes more than twice as long in each of four rounds, or over a quarter more time in nearly all of ten."""
    far = np.array([[1.0, 2.1]] * 4)
    assert tuning._clearly_slower(far).tolist() == [False, True]
    assert not tuning._clearly_slower(far[:3]).any()
    assert not tuning._clearly_slower(np.array([[1.0, 2.1]] * 3 + [[1.0, 1.9]])).any()

    clearly = np.array([[1.0, 1.3]] * 9 + [[1.0, 0.9]])
    assert tuning._clearly_slower(clearly).tolist() == [False, True]
    assert not tuning._clearly_slower(clearly[1:]).any()
    assert not tuning._clearly_slower(np.array([[1.0, 1.3]] * 8 + [[1.0, 0.9]] * 2)).any()
    assert not tuning._clearly_slower(np.array([[1.0, 1.2]] * 10)).any()


def test_where_time_is_short_an_algorithm_that_falls_behind_is_not_called(monkeypatch):
    """Here naive takes 1, 3, 5, ... times as long as the others, and two_level 9, 8, 7, ... times: its ratio falls.

    A call takes seconds, and a visit's share of the time is one second, so that time is short from the first size on.
    """
    monkeypatch.setattr(tuning, "MOST_ROUNDS", 3)
    monkeypatch.setattr(tuning, "SIZES", SIZES[:6])
    monkeypatch.setattr(tuning, "_share", lambda: 1.0)
    monkeypatch.setattr(tuning, "BUDGET", inf)
    called = []

    def seconds(comm, call, calls):
        name, nbytes = call.args[1].partition("/")[2], call.args[3][0].nbytes
        column = SIZES.index(nbytes)
        called.append((name, column))
        return {"naive": 1.0 + 2 * column, "two_level": 9.0 - column}.get(name, 1.0)

    monkeypatch.setattr(tuning, "_seconds", seconds)
    table = SimWorld(1).run(tuning._measure, "all_reduce", candidates("all_reduce"))[0]
    columns = {name: {column for also, column in called if also == name} for name in NAMES}
    assert columns.pop("naive") == {0, 1}
    assert set(map(frozenset, columns.values())) == {frozenset(range(6))}
    assert table[NAMES.index("naive")].round(3).tolist() == [1.0, 3.0, 3.0, 3.0, 3.0, 3.0]


def test_a_slow_network_is_measured_for_short_arrays_alone(monkeypatch, tmp_path, capsys):
    """No time for a second size, and none for several calls in a row: 1 + LEAST_ROUNDS calls of each algorithm."""
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    (times, _), sent = run(2, pretended(monkeypatch, tmp_path, 2))
    assert times.columns == 1
    assert times.fastest(SIZES[1]) is None
    one = sum(bytes_of("all_reduce", name, SIZES[0] // 4, 2, 1) for name in NAMES)
    assert sent[1] == (1 + tuning.LEAST_ROUNDS) * (one + 8 * (len(NAMES) + 1))
    assert 'measured all_reduce on 2 ranks for algorithm="auto" in' in capsys.readouterr().err


def test_the_next_run_reads_what_this_one_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    world = pretended(monkeypatch, tmp_path, 3)
    first, _ = run(3, world)
    again, sent = run(3, world)
    assert np.array_equal(first[0].seconds, again[2].seconds)
    assert sent == [2 * 8 * len(NAMES) * len(SIZES), 0, 0]  # rank 0 tells the others
    assert capsys.readouterr().err.count("measured") == 1

    # Only rank 0 reads: the others may have another disk, with another table or none.
    place = entry_of("all_reduce", world.hosts, "MPICH 5", nodes=None, checks=True, synchronous=False)
    tuning.write_entry(place, table(*["ring"] * len(SIZES)))
    reads = []
    monkeypatch.setattr(tuning, "read_entry", lambda place: reads.append(place) or table(*["naive"] * len(SIZES)))
    assert [times.fastest(10**6) for times in run(3, world)[0]] == ["naive"] * 3
    assert reads == [place]
    monkeypatch.undo()

    # Measured anew, or not used at all; another word is refused before anything is sent.
    world = pretended(monkeypatch, tmp_path, 3)
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    assert run(3, world, anew=True)[0][1].columns == 1
    tuning.write_entry(place, table(*["ring"] * len(SIZES)))
    monkeypatch.setenv("MINIDIST_TUNING", "refresh")
    assert run(3, world)[0][1].columns == 1
    monkeypatch.setenv("MINIDIST_TUNING", "off")
    for anew in (False, True):
        assert run(3, world, anew=anew) == ([None] * 3, [2 * 8 * len(NAMES) * len(SIZES), 0, 0])
    monkeypatch.setenv("MINIDIST_TUNING", "no")
    with pytest.raises(UsageError, match=r"MINIDIST_TUNING='no'; use refresh to measure .* or off"):
        run(3, world)


def test_a_damaged_table_is_measured_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    world = pretended(monkeypatch, tmp_path, 2)
    run(2, world)
    (place,) = tmp_path.iterdir()
    place.write_bytes(place.read_bytes()[:-40] + bytes(40))
    assert run(2, world)[0][1].columns == 1
    text = capsys.readouterr().err
    assert (text.count("is damaged"), text.count("measured all_reduce")) == (1, 2)
    assert kept_times(place, "all_reduce") is not None
    place.write_bytes(b"")
    assert kept_times(place, "all_reduce") is None


def test_a_cache_that_cannot_be_written_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    world = pretended(monkeypatch, tmp_path, 2)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path / "file"))
    assert run(2, world)[0][1].columns == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_table_belongs_to_what_its_times_depend_on(monkeypatch, tmp_path):
    """Another machine, number of ranks, ranks per node, library, transport, number of cores, or other algorithms."""
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path))
    usual = {"nodes": None, "checks": True}
    keys = {
        entry_of("all_reduce", hosts, "MPICH 5", **usual) for hosts in (["a"] * 2, ["a"] * 3, ["b"] * 2, ["a", "b"])
    }
    keys.add(entry_of("all_gather", ["a"] * 2, "MPICH 5", **usual))
    keys.add(entry_of("all_reduce", ["a"] * 2, "MPICH 6", **usual))
    keys.add(entry_of("all_reduce", ["a"] * 2, "MPICH 5", nodes=[[0], [1]], checks=True))
    keys.add(entry_of("all_reduce", ["a"] * 2, "MPICH 5", nodes=None, checks=False))
    monkeypatch.setenv("UCX_TLS", "tcp")
    keys.add(entry_of("all_reduce", ["a"] * 2, "MPICH 5", **usual))
    monkeypatch.setattr(tuning, "usable_cores", lambda: [0] * 99)
    keys.add(entry_of("all_reduce", ["a"] * 2, "MPICH 5", **usual))
    monkeypatch.setattr(tuning, "candidates", lambda operation: ["ring"])
    keys.add(entry_of("all_reduce", ["a"] * 2, "MPICH 5", **usual))
    assert len(keys) == 11


def test_times_of_a_users_algorithm_are_of_this_run_alone(monkeypatch, tmp_path, capsys):
    """Its code may be another in the next run."""
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    before = dict(ALGORITHMS["all_reduce"])
    try:
        algorithm("all_reduce", "mine", seconds=lambda *_: 0.0)(
            lambda comm, array, op: ring.all_reduce(comm, array, op)
        )
        found, _ = run(2, pretended(monkeypatch, tmp_path, 2))
        assert "mine" in found[1].names
        assert "for this run, because an algorithm is the user's" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
    finally:
        ALGORITHMS["all_reduce"].clear()
        ALGORITHMS["all_reduce"].update(before)


@pytest.mark.mpi(3)
def test_real_ranks_choose_by_the_clock_and_groups_of_them_by_formula(comm, monkeypatch, tmp_path):
    """The table says what no formula would; every rank takes it, a duplicate reads it, and a part of the ranks does
    not use it.
    """
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_TUNING", raising=False)
    monkeypatch.setattr(tuning, "_measure", lambda *_: table("two_level", "naive"))
    array = np.full(1000, comm.rank + 1.0)
    all_reduce(comm, array, algorithm="auto")
    assert array.tolist() == [6.0] * 1000
    sent = comm.trace.bytes_by_purpose()["tuning"] if comm.rank == 0 else 0
    assert sent == (2 * 8 * len(NAMES) * len(SIZES) if comm.rank == 0 else 0)
    taken = [m.operation for m in comm.trace.messages if m.purpose == "user"]
    assert set(taken) == {"all_reduce/two_level"}

    # A second communicator reads the file of rank 0; the others have a separate folder.
    monkeypatch.setattr(tuning, "_measure", None)
    assert auto.choose(comm.dup(), "all_reduce", SIZES[1]) == "naive"
    part = comm.split(comm.rank // 2)
    assert auto.choose(part, "all_reduce", 8000) == auto.cheapest("all_reduce", 8000, part.size, 1e-6, 1e-10)
    # The next calls look this choice up, too.
    assert ("all_reduce", 8000) in part.choices

    # Where one size was measured, longer arrays have the formulas.
    monkeypatch.setattr(tuning, "_measure", lambda *_: table("two_level"))
    monkeypatch.setenv("MINIDIST_TUNING", "refresh")
    other = comm.dup()
    assert auto.choose(other, "all_reduce", SIZES[0]) == "two_level"
    assert auto.choose(other, "all_reduce", SIZES[2]) == auto.cheapest("all_reduce", SIZES[2], 3, 1e-6, 1e-10)
    assert ("all_reduce", SIZES[2]) in other.choices
