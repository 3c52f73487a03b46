"""The checker: smallest counterexamples, endless programs, par from our own solution, and the leg under mpiexec."""

import os
import subprocess
import sys
import threading
import time
from datetime import date

import numpy as np
import pytest

from minidist.comm import call_site
from minidist.core.base.errors import DeadlockError, MismatchError, UsageError
from minidist.course.lesson import check, examine, expect, mpi_leg, solution
from minidist.course.lesson.answer_process import Job
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.exercise import Case
from minidist.course.lesson.mpi_leg import mpiexec
from minidist.course.lesson.runner import Limits
from minidist.course.lesson.transport import Packed, dumps, dumps_of_exercise
from tests.cases import each
from tests.lesson.par_table import run

our_ring_all_reduce, our_by_order, our_by_sendrecv = map(
    solution, ("04.ring_all_reduce", "03.by_order", "03.by_sendrecv")
)
needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")


def test_the_counterexample_is_the_smallest_one():
    def fails_from_three_ranks_and_two_elements(comm, array):
        if comm.size >= 3 and array.size >= 2:
            return
        our_ring_all_reduce(comm, array)

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
    assert isinstance(run(exercise, all_send_first, Case(2, 1))[0].error, DeadlockError)
    assert run(exercise, all_send_first, Case(2, 1), buffered=True)[0].error is None

    def slow_when_buffered(comm, outgoing):  # right when sends are synchronous, and only then
        answer = our_by_order(comm, outgoing)
        if comm.rank == 0 and comm.size > 1:
            before = comm.time()
            comm.send(outgoing, 1, tag=1)
            answer[:] += comm.time() - before < 1e-3
        elif comm.rank == 1:
            comm.compute(seconds=1e-2)
            comm.recv(outgoing, 0, tag=1)
        return answer

    assert run(exercise, slow_when_buffered, Case(2, 1))[0].answers == [100.0, 0.0]
    assert run(exercise, slow_when_buffered, Case(2, 1), buffered=True)[0].answers == [101.0, 0.0]


def yields(*arguments):
    yield arguments


async def asynchronous(*arguments):
    return arguments


async def asynchronous_generator(*arguments):
    yield arguments


@each("name", ["04.ring_all_reduce", "16.gpipe", "11.zero_step"])
@each(
    ("function", "what"),
    [
        (yields, "a generator, so none of its lines has run; remove `yield` from it"),
        (asynchronous, "a coroutine, so none of its lines has run; remove `async`"),
        (asynchronous_generator, "an asynchronous generator, so none of its lines has run; remove `async` and `yield`"),
    ],
)
def test_an_answer_of_which_no_line_has_run_is_told_so(name, function, what):
    result = examine(name, function, mpi=False)
    assert not result.passed
    where = "rank 0: " if find(name).communicates else ""
    assert f"NotRunError: {where}{function.__name__} returned {what}" in result.text
    assert not result.hint  # the sentence has the remedy


def test_the_exercise_that_wants_a_generator_takes_one_and_no_coroutine():
    assert examine("17c.two_versions", solution("17c.two_versions"), mpi=False).passed
    assert "returned a coroutine, so none" in examine("17c.two_versions", asynchronous, mpi=False).text
    assert "so none of its lines" not in examine("17c.two_versions", yields, mpi=False).text


def test_a_rank_that_computes_without_end_is_stopped():
    def endless(comm, array):
        while comm.rank == 0:
            pass

    result = examine("04.ring_all_reduce", endless, mpi=False, limits=Limits(compute_s=0.2))
    assert "--timeout" not in result.text  # which `check` has not
    assert "does not end" in result.hint


@each("answer, parameters", [(lambda comm: None, "(comm)"), (lambda comm, array, step: None, "(comm, array, step)")])
def test_an_answer_with_other_parameters_is_told_what_it_gets(answer, parameters):
    result = examine("04.ring_all_reduce", answer, mpi=False)
    assert f"the parameters {parameters}, and the exercise passes 2: comm, an array of shape (0,)" in result.text
    assert result.hint == "give the function the parameters of the stub, in their order"


def test_a_program_that_sends_without_end_is_stopped():
    def endless(comm, array):
        while True:
            comm.sendrecv(array.copy(), (comm.rank + 1) % comm.size, array, (comm.rank - 1) % comm.size)

    assert "again and again" in examine("04.ring_all_reduce", endless, mpi=False).hint


def test_par_is_measured_and_printed_beside_yours(capsys):
    def two_messages_more(comm, gradient, count):
        from minidist.core.collectives import all_reduce

        total = all_reduce(comm, np.array([float(count)]))
        weighted = gradient * count if count else np.zeros_like(gradient)
        return all_reduce(comm, weighted) / total

    check("06.weighted_average", two_messages_more, mpi=False)
    text = capsys.readouterr().out
    result = examine("06.weighted_average", two_messages_more, mpi=False)
    assert result.passed  # more messages than par, which this exercise allows
    assert result.yours["messages"] == 2 * result.par["messages"] == 12
    assert "most messages from a rank: par 6, yours 12" in text


def test_what_a_function_prints_is_shown_for_one_run(capsys):
    def talks(comm, outgoing):
        if comm.rank == 0:
            print(f"{comm.size} ranks and {outgoing.size} elements")
        return our_by_sendrecv(comm, outgoing)

    check("03.by_sendrecv", talks, mpi=False)
    assert capsys.readouterr().out.count("ranks and") == 1
    check("03.by_sendrecv", lambda comm, outgoing: print("wrong" * 9_999), mpi=False)
    assert capsys.readouterr().out.count("wrong") == 2_000


def test_the_seed_draws_cases_and_is_printed(monkeypatch):
    assert "drawn by seed 7" in examine("03.by_sendrecv", our_by_sendrecv, mpi=False, seed=7).text
    today = date.today().strftime("%Y%m%d")
    monkeypatch.delenv("MINIDIST_LESSON_SEED", raising=False)
    assert f"drawn by seed {today}" in examine("03.by_sendrecv", our_by_sendrecv, mpi=False).text
    monkeypatch.setenv("MINIDIST_LESSON_SEED", "12")
    assert "drawn by seed 12" in examine("03.by_sendrecv", our_by_sendrecv, mpi=False).text
    monkeypatch.setenv("MINIDIST_LESSON_SEED", "twelve")
    with pytest.raises(UsageError, match="must be a whole number"):
        examine("03.by_sendrecv", our_by_sendrecv, mpi=False)

    exercise = find("03.by_sendrecv")
    assert exercise.drawn(7) == exercise.drawn(7) != exercise.drawn(8)
    fixed = exercise.cases()
    drawn = next(case for case in exercise.drawn(7) if case.ranks > 1 and case.size > 0)

    def wrong_on_a_drawn_case(comm, outgoing):
        answer = our_by_sendrecv(comm, outgoing)
        return answer + 1 if (comm.size, outgoing.size) == (drawn.ranks, drawn.size) else answer

    assert all((case.ranks, case.size) != (drawn.ranks, drawn.size) for case in fixed)
    result = examine("03.by_sendrecv", wrong_on_a_drawn_case, mpi=False, seed=7)
    assert not result
    assert "(drawn by seed 7)" in result.text


def test_an_error_names_its_line_also_in_a_helper_of_another_cell(monkeypatch):
    scope = {}
    exec(compile("def helper(array):\n    return array[99]", "/tmp/ipykernel_9/8.py", "exec"), scope)
    exec(compile("def calls(comm, outgoing):\n    helper([])", "/tmp/ipykernel_9/7.py", "exec"), scope)
    monkeypatch.setitem(call_site.cells, "/tmp/ipykernel_9/7.py", "Cell In[4]")
    monkeypatch.setitem(call_site.cells, "/tmp/ipykernel_9/8.py", "Cell In[3]")
    text = examine("03.by_order", scope["calls"], mpi=False).text
    assert "IndexError: list index out of range, at Cell In[3], line 2" in text


def test_a_report_names_the_cell_of_the_notebook(monkeypatch):
    source = "def waits(comm, outgoing):\n    comm.recv(outgoing, comm.rank)"
    scope = {}
    exec(compile(source, "/tmp/ipykernel_9/7.py", "exec"), scope)
    monkeypatch.setitem(call_site.cells, "/tmp/ipykernel_9/7.py", "Cell In[4]")
    assert "at Cell In[4], line 2" in examine("03.by_order", scope["waits"], mpi=False).text


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="without calling it"):
        examine("03.by_sendrecv", np.zeros(3))


def test_an_exercise_is_checked_by_a_name_that_it_had_before():
    result = examine("31.stages_by_time", solution("10c.stages_by_time"), mpi=False)
    assert result.passed
    assert result.text.startswith("20c.stages_by_time: correct")


def test_an_unknown_exercise_is_named():
    with pytest.raises(UsageError, match=r"did you mean '04\.ring_all_reduce'"):
        examine("04.ring_allreduce", print)


shared = []


def cheat(comm, array):
    """Sends what a sum needs, and takes the sum from a list that all simulated ranks see."""
    our_ring_all_reduce(comm, array.copy())
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
def test_a_rank_that_waits_for_ever_under_mpiexec_only_is_reported():
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
def test_a_busy_machine_refuses_no_right_answer_under_mpiexec(monkeypatch):
    """A rank that gets no processor is one that sleeps: the others see no progress, or the job does not end."""

    def starved(comm, outgoing):
        if comm.world.kind == "mpi" and comm.rank == 0:
            time.sleep(2)
        return our_by_sendrecv(comm, outgoing)

    exercise, places = find("03.by_sendrecv"), tuple(sys.path)
    cases = [case for case in exercise.cases() if case.ranks == 3][:1]
    arguments = exercise, Packed(dumps(starved)), cases, mpiexec(), places
    monkeypatch.setattr(mpi_leg, "TIMEOUT", 0.5)
    assert mpi_leg.run_under_mpi(*arguments) == ("", "also correct on 3 ranks")
    monkeypatch.setattr(mpi_leg, "AGAIN", 1)
    assert "no progress on rank" in mpi_leg.run_under_mpi(*arguments)[0]
    monkeypatch.setattr(mpi_leg, "GIVE_UP", 0.1)
    problem, note = mpi_leg.run_under_mpi(*arguments)
    assert problem == ""
    assert note == "not judged, because 3 ranks had not ended after 0.1 s; check again"


@needs_mpi
def test_a_rank_that_computes_without_end_under_mpiexec_only_is_stopped(tmp_path):
    def endless(comm, outgoing):
        while comm.world.kind == "mpi" and comm.rank == 0:
            pass
        return our_by_sendrecv(comm, outgoing)

    exercise = find("03.by_sendrecv")
    inputs = [[dumps_of_exercise(exercise.arguments(Case(3, 4), rank)) for rank in range(3)]]
    job = Job(exercise.task, Packed(dumps(endless)), tuple(sys.path), (), 60.0, None)
    (tmp_path / "job").write_bytes(dumps_of_exercise((job, inputs)))
    program = f"from minidist.course.lesson import mpi_leg as leg; leg.COMPUTE = 2; leg.main({str(tmp_path)!r})"
    command = [mpiexec(), "-n", "3", sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode != 0
    assert "still running after 2 s of computing" in ended.stdout + ended.stderr


@needs_mpi
def test_answers_from_processes_are_judged_too():
    def wrong_in_processes(comm, outgoing):
        return our_by_sendrecv(comm, outgoing) + (comm.world.kind == "mpi")

    result = examine("03.by_sendrecv", wrong_in_processes)
    assert not result.passed
    assert "expected" in result.text


def test_without_mpi_the_leg_says_so(monkeypatch):
    monkeypatch.setattr("minidist.course.lesson.mpi_leg.mpiexec", lambda: None)
    result = examine("03.by_sendrecv", solution("03.by_sendrecv"))
    assert result.passed
    assert "there is no MPI here" in result.text


def test_what_cannot_be_sent_is_reported():
    lock = threading.Lock()

    def needs_a_lock(comm, outgoing):
        with lock:
            return our_by_sendrecv(comm, outgoing)

    result = examine("03.by_sendrecv", needs_a_lock)
    assert not result
    assert "cannot be sent" in result.text
    assert "inside the function" in result.hint


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
    program = "import minidist.course.lesson, minidist.report, sys; print(*sys.modules)"
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


@pytest.mark.parametrize(
    ("name", "answer", "sentence"),
    [
        ("03.by_ordr", print, "there is no exercise '03.by_ordr' (did you mean '03.by_order'?)\n"),
        ("03.by_order", None, "03.by_order is answered by a function, not by None; pass it without calling it\n"),
    ],
)
def test_a_wrong_name_or_answer_is_one_sentence(name, answer, sentence, capsys):
    check(name, answer)
    assert capsys.readouterr().out == sentence
