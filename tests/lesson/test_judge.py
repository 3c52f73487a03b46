"""The judge is another process, and any answer gets a verdict. What tries to fool it is in test_cheats.py."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from minidist.collectives.auto import cheapest
from minidist.core.base.errors import MinidistError
from minidist.course.lesson import checker, examine, names, solution
from minidist.course.lesson.mpi_leg import mpiexec
from tests.cases import each
from tests.lesson.test_plain import ODD, USUAL

our_gpipe, our_ring_all_reduce = solution("16.gpipe"), solution("04.ring_all_reduce")
needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")


@dataclass
class Neighbours:
    rank: int
    size: int

    def right(self):
        return (self.rank + 1) % self.size


class Exchange:
    def __init__(self, distance):
        self.distance = distance

    def by_method(self, comm, outgoing):
        incoming = np.empty_like(outgoing)
        right = Neighbours(comm.rank, comm.size).right()
        comm.sendrecv(outgoing, right, incoming, (comm.rank - self.distance) % comm.size)
        return incoming


@needs_mpi
@pytest.mark.parametrize(
    "function",
    [Exchange(1).by_method, partial(lambda method, comm, x: method(comm, x), Exchange(1).by_method)],
    ids=["method", "partial"],
)
def test_classes_methods_and_partials_of_a_notebook_pass_both_legs(function):
    result = examine("03.by_sendrecv", function)
    assert result.passed, result.text
    assert "also correct on 3 ranks" in result.text


def wrong(comm, outgoing):
    return outgoing + 1


def test_patching_the_comparison_here_changes_nothing(monkeypatch):
    monkeypatch.setattr("minidist.course.lesson.exercise.difference", lambda *arguments: "")
    monkeypatch.setattr("minidist.course.lesson.exercise.Exercise.problem", lambda *arguments: "")
    monkeypatch.setattr("minidist.course.lesson.judge.find_failure", lambda *arguments: None)
    assert not examine("03.by_sendrecv", wrong, mpi=False)


SOME = (-1, [3, "x"], [[[0.5]]])


@each(("number", "name"), enumerate(names()), sampled=16)
def test_any_returned_value_gets_a_verdict(number, name):
    value = SOME[number % len(SOME)]
    assert examine(name, lambda *arguments: value, mpi=False).text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", names())
def test_every_kind_of_returned_value_gets_a_verdict(name):
    makers = [lambda value=value: value for value in (*USUAL, *SOME, {"a": None}, [None], [[1, 2]] * 4)]
    for make in (*makers, *ODD):
        assert examine(name, lambda *arguments, make=make: make(), mpi=False).text


@each("make", ODD, sampled=12)
def test_any_odd_object_gets_a_verdict(make):
    for name in ("16.gpipe", "06c.ssp", "06.weighted_average", "17c.two_versions"):
        assert not examine(name, lambda *arguments: make(), mpi=False)


def test_the_librarys_own_solution_is_named_and_refused():
    def all_reduce(comm, array):
        from minidist.core import collectives

        collectives.all_reduce(comm, array)

    def scatters(comm, array):
        from minidist.core.collectives.calls import reduce_scatter

        return reduce_scatter(comm, array, algorithm="ordered")

    def schedule(p, m):
        from minidist.pipeline.schedules import get_schedule

        return get_schedule("gpipe").plan(p, m).orders

    for name, function, called in (
        ("04.ring_all_reduce", all_reduce, "minidist.core.collectives.calls.all_reduce"),
        ("04b.ordered_reduce_scatter", scatters, "minidist.core.collectives.calls.reduce_scatter"),
        ("05.halving_doubling", all_reduce, "minidist.core.collectives.calls.all_reduce"),
        (
            "05.choose",
            lambda n, size, a, b: cheapest("all_reduce", size, n, a, b),
            "minidist.collectives.auto.cheapest",
        ),
        ("16.gpipe", schedule, "get_schedule"),
        ("17.one_f_one_b", schedule, "get_schedule"),
        ("19.zero_bubble", schedule, "get_schedule"),
        ("16.gpipe", lambda p, m: solution("16.gpipe")(p, m), "minidist.course.lesson.solutions.solution"),
    ):
        result = examine(name, function, mpi=False)
        assert not result, name
        assert f"{called}, which does what this exercise asks you to write" in result.text, result.text


def test_one_number_of_ranks_is_no_range():
    assert "(2 ranks, " in examine("puzzle.m01", solution("puzzle.m01")).text


def test_one_judge_serves_a_session_and_comes_back_after_its_end():
    examine("16.gpipe", our_gpipe, mpi=False)
    judge = checker._session().process.pid
    examine("16.gpipe", our_gpipe, mpi=False)
    assert checker._session().process.pid == judge
    os.kill(judge, signal.SIGKILL)
    with suppress(MinidistError):  # what was asked before its end was noticed
        examine("16.gpipe", our_gpipe, mpi=False)
    assert examine("16.gpipe", our_gpipe, mpi=False).passed


def test_an_interrupt_of_the_check_ends_the_judge_and_the_answer():
    examine("16.gpipe", our_gpipe, mpi=False)
    session = checker._session()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        examine("16.gpipe", lambda p, m: time.sleep(1.5), mpi=False)
    assert not session.alive
    assert examine("16.gpipe", our_gpipe, mpi=False).passed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_notebook_that_is_killed_leaves_neither_a_judge_nor_an_answer(tmp_path):
    program = f"""
import os, time
from minidist.course.lesson import examine
def forever(p, m):
    open(os.path.join({str(tmp_path)!r}, f"{{os.getpid()}} {{os.getppid()}}"), "w").close()
    time.sleep(60)
examine("16.gpipe", forever, mpi=False)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while not list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    (found,) = tmp_path.iterdir()
    until = time.monotonic() + 10
    while any(Path("/proc", pid).exists() for pid in found.name.split()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in found.name.split() if Path("/proc", pid).exists()]


@needs_mpi
def test_under_mpiexec_an_answer_cannot_import_an_exercise_either():
    def imports(comm, array):
        our_ring_all_reduce(comm, array)
        if "mpi4py" in sys.modules:
            import minidist.course.lesson.exercises.e04_ring_all_reduce as exercise

            array[...] = exercise.total(None)

    result = examine("04.ring_all_reduce", imports)
    assert not result
    assert "belongs to the judge" in result.text
