"""The checker: smallest counterexamples, endless programs, par from our own solution, and the leg under mpiexec."""

import os
import subprocess
import sys

import numpy as np
import pytest

from minidist.base.errors import DeadlockError, MismatchError, UsageError
from minidist.lesson import check, examine, expect, solution
from minidist.lesson.checker import run
from minidist.lesson.exercise import Case, find
from minidist.lesson.mpi_leg import mpiexec
from minidist.lesson.transport import dumps, loads

needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")


def test_the_counterexample_is_the_smallest_one():
    def fails_from_three_ranks_and_two_elements(comm, array):
        if comm.size >= 3 and array.size >= 2:
            return
        solution("04.ring_all_reduce")(comm, array)

    result = examine("04.ring_all_reduce", fails_from_three_ranks_and_two_elements, mpi=False)
    assert (result.failure.case.ranks, result.failure.case.size) == (3, 3)
    assert "smallest counterexample: 3 ranks, 3 elements, synchronous sends" in result.text
    assert result.figure is None  # no rank sent anything


def test_a_failure_comes_with_its_space_time_diagram():
    def crosses(comm, outgoing):
        comm.send(outgoing, (comm.rank + 1) % comm.size)

    result = examine("03.by_order", crosses, mpi=False)
    assert isinstance(result.failure.error, DeadlockError)
    assert "deadlock" in result.figure.axes[0].get_title(loc="left")


def test_each_case_runs_with_synchronous_and_with_buffered_sends():
    def all_send_first(comm, outgoing):
        if comm.size > 1:
            comm.send(outgoing, (comm.rank + 1) % comm.size)
            comm.recv(outgoing, (comm.rank - 1) % comm.size)
        return outgoing

    exercise = find("03.by_order")
    assert isinstance(run(exercise, all_send_first, Case(2, 1)).error, DeadlockError)
    assert run(exercise, all_send_first, Case(2, 1), buffered=True).error is None

    def slow_when_buffered(comm, outgoing):  # right when sends are synchronous, and only then
        answer = solution("03.by_order")(comm, outgoing)
        if comm.rank == 0 and comm.size > 1:
            before = comm.time()
            comm.send(outgoing, 1, tag=1)
            answer[:] += comm.time() - before < 1e-3
        elif comm.rank == 1:
            comm.compute(seconds=1e-2)
            comm.recv(outgoing, 0, tag=1)
        return answer

    assert run(exercise, slow_when_buffered, Case(2, 1)).answers == [100.0, 0.0]
    assert run(exercise, slow_when_buffered, Case(2, 1), buffered=True).answers == [101.0, 0.0]


def test_a_rank_that_computes_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr("minidist.lesson.checker.TIMEOUT", 0.2)

    def endless(comm, array):
        while comm.rank == 0:
            pass

    assert "does not end" in examine("04.ring_all_reduce", endless, mpi=False).hint


def test_a_program_that_sends_without_end_is_stopped():
    def endless(comm, array):
        while True:
            comm.sendrecv(array.copy(), (comm.rank + 1) % comm.size, array, (comm.rank - 1) % comm.size)

    assert "again and again" in examine("04.ring_all_reduce", endless, mpi=False).hint


def test_par_is_measured_and_printed_beside_yours(capsys):
    def two_messages_more(comm, gradient, count):
        from minidist.collectives import all_reduce

        total = all_reduce(comm, np.array([float(count)]))
        weighted = gradient * count if count else np.zeros_like(gradient)
        return all_reduce(comm, weighted) / total

    check("06.weighted_average", two_messages_more, mpi=False)
    text = capsys.readouterr().out
    result = examine("06.weighted_average", two_messages_more, mpi=False)
    assert result.passed  # more messages than par, which this exercise allows
    assert result.yours["messages"] == 2 * result.par["messages"] == 12
    assert "most messages from a rank: par 6, yours 12" in text


def test_an_unknown_exercise_is_named():
    with pytest.raises(UsageError, match=r"did you mean '04\.ring_all_reduce'"):
        examine("04.ring_allreduce", print)


shared = []


def cheat(comm, array):
    """Leaves its part in a list that all simulated ranks see."""
    comm.barrier()
    shared.append(array.copy())
    comm.barrier()
    parts = shared[-comm.size :]
    comm.barrier()
    array[...] = np.sum(parts, axis=0)


@needs_mpi
def test_a_shared_list_communicates_for_free_in_one_process_and_fails_under_mpiexec():
    assert examine("04.ring_all_reduce", cheat, mpi=False).passed
    result = examine("04.ring_all_reduce", cheat)
    assert not result.passed
    assert "share nothing but messages" in result.hint
    assert "under mpiexec, on 3 ranks" in result.text


@needs_mpi
def test_a_function_from_a_cell_runs_under_mpiexec_with_its_helpers():
    scope = {"np": np}
    source = """
def place(comm, offset=1):
    return (comm.rank + offset) % comm.size

def mine(comm, outgoing):
    incoming = np.empty_like(outgoing)
    comm.sendrecv(outgoing, place(comm), incoming, place(comm, offset=-1))
    return incoming
"""
    exec(source, scope)
    scope["place"].__module__ = scope["mine"].__module__ = "__main__"
    result = examine("03.by_sendrecv", scope["mine"])
    assert result.passed, result.text
    assert "also correct on 3 ranks" in result.text


@needs_mpi
def test_a_rank_that_waits_for_ever_under_mpiexec_only_is_reported(monkeypatch):
    def hangs_in_processes(comm, outgoing):
        if comm.world.kind == "mpi" and comm.rank == 0:
            raise ValueError("only here")
        incoming = np.empty_like(outgoing)
        comm.sendrecv(outgoing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        return incoming

    result = examine("03.by_sendrecv", hangs_in_processes)
    assert not result.passed
    assert "only here" in result.text


@needs_mpi
def test_answers_from_processes_are_judged_too():
    def wrong_in_processes(comm, outgoing):
        return solution("03.by_sendrecv")(comm, outgoing) + (comm.world.kind == "mpi")

    result = examine("03.by_sendrecv", wrong_in_processes)
    assert not result.passed
    assert "expected" in result.text


def test_without_mpi_the_leg_says_so(monkeypatch):
    monkeypatch.setattr("minidist.lesson.mpi_leg.mpiexec", lambda: None)
    result = examine("03.by_sendrecv", solution("03.by_sendrecv"))
    assert result.passed
    assert "there is no MPI here" in result.text


def test_what_cannot_be_sent_is_reported():
    lock = sys.stdout

    def needs_a_file(comm, outgoing):
        assert lock
        return solution("03.by_sendrecv")(comm, outgoing)

    if mpiexec() is not None:
        assert "cannot be sent" in examine("03.by_sendrecv", needs_a_file).text


def test_transport_carries_closures_defaults_and_recursion():
    base = 10

    def factorial(n):
        return 1 if n <= 1 else n * factorial(n - 1)

    def function(n, plus=2, *, times=3):
        return base + times * factorial(n) + plus + int(np.sum([1, 2]))

    again = loads(dumps(function))
    assert again(4) == function(4) == 10 + 72 + 2 + 3
    assert again.__globals__ is not function.__globals__


def test_expect_demands_exactly_that_exception(capsys):
    with expect(DeadlockError) as caught:
        raise DeadlockError("rank 0 waits")
    assert caught.error.args == ("rank 0 waits",)
    assert capsys.readouterr().out == "DeadlockError: rank 0 waits\n"
    with pytest.raises(AssertionError, match="nothing was raised"), expect(DeadlockError):
        pass
    with pytest.raises(AssertionError, match="got MismatchError"), expect(DeadlockError):
        raise MismatchError("other")


def test_importing_lessons_and_pictures_is_light():
    program = "import minidist.lesson, minidist.report, sys; print(*sys.modules)"
    path = os.pathsep.join(sys.path)
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    heavy = {"matplotlib", "jupytext", "nbclient", "nbformat", "IPython", "mpi4py"}
    assert not heavy & set(process.stdout.split())
