"""The runner of `mpi` tests, run on small modules: what passes, what fails, what hangs, and what is said about it.

Each module goes through a separate pytest (a subprocess), because the runner is a plugin of a whole session. What
happens before any rank starts is tried in `make exhaustive`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREAMBLE = """
import os, sys, time
import pytest

def world():
    from mpi4py import MPI
    return MPI.COMM_WORLD
"""


def outcomes_in(folder, source, *options):
    """(outcomes by test name, output) of a pytest over a module with that source."""
    pytest.importorskip("mpi4py.rc", reason="mpi4py is not installed")  # mpi4py.rc does not start MPI
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.mpi_runner"]\n')
    settings = "[pytest]\nmarkers =\n  mpi(n, timeout)\n  slow\naddopts = --strict-markers -m 'not slow'\n"
    (folder / "pytest.ini").write_text(settings)
    (folder / "test_inner.py").write_text(PREAMBLE + source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_inner.py", *options]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)
    output = process.stdout + process.stderr
    outcomes = {}
    for line in output.splitlines():
        outcome, _, name = line.partition(" test_inner.py::")
        if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED") and name:
            outcomes[name.split(" - ")[0]] = outcome
    return outcomes, output


@pytest.fixture
def run(tmp_path):
    """run(source, *options) -> what outcomes_in returns, in a folder of the test's own."""
    return partial(outcomes_in, tmp_path)


# All kinds of failure in one module: what follows a failure must not be disturbed by it.
WRONG = """
@pytest.mark.mpi(2)
def test_before():
    if world().rank == 0:
        from tests.mpi_runner import shared_memory_of
        open("shared_memory.txt", "w").write("\\n".join(shared_memory_of(os.getpid())))

@pytest.mark.mpi(2)
def test_raises():
    if world().rank == 1:
        print("printed before")
        raise ValueError("only rank 1")
    world().recv(source=1)

@pytest.mark.mpi(2)
def test_after():
    assert world().allreduce(1) == 2

def waits_for_rank_1():
    world().recv(source=1)

@pytest.mark.mpi(2, timeout=1.5)
def test_hangs():
    waits_for_rank_1() if world().rank == 0 else None

@pytest.mark.mpi(2)
def test_dies():
    if world().rank == 1:
        os._exit(7)
    world().recv(source=1)

@pytest.mark.mpi(2)
def test_skips_on_one():
    if world().rank == 1:
        pytest.skip("not here")

@pytest.mark.mpi(2)
def test_skips_on_all():
    pytest.skip("nowhere")

@pytest.mark.mpi(2)
def test_exchange(comm):
    import numpy as np
    mine, other = np.full(3, comm.rank), np.zeros(3, int)
    comm.sendrecv(mine, 1 - comm.rank, other, 1 - comm.rank)
    assert (other == 1 - comm.rank).all()

@pytest.mark.mpi(2)
def test_never_received(comm):
    if comm.rank == 0:
        import numpy as np
        comm.send(np.zeros(1), 1)

def test_alone(comm):
    pass
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """(outcomes, output, folder) of WRONG."""
    folder = tmp_path_factory.mktemp("wrong")
    return *outcomes_in(folder, WRONG), folder


@pytest.mark.exhaustive
def test_only_what_the_parent_selects_runs_although_its_settings_leave_it_out(run):
    program = """
@pytest.mark.slow
@pytest.mark.mpi(2)
def test_slow():
    assert world().size == 2

@pytest.mark.slow
@pytest.mark.mpi(2)
def test_other():
    raise ValueError("not selected")
"""
    outcomes, output = run(program, "-m", "slow", "-k", "test_slow")
    assert outcomes == {"test_slow": "PASSED"}, output


def test_every_rank_runs_the_test_and_the_parent_does_not_import_mpi4py(run, tmp_path):
    """Also of a second module, in the same processes."""
    second = """
@pytest.mark.mpi(2)
def test_the_same_processes():
    assert int(open(f"pid-{world().rank}").read()) == os.getpid()
"""
    (tmp_path / "test_second.py").write_text(PREAMBLE + second)
    program = """
@pytest.mark.mpi(2)
@pytest.mark.parametrize("root", [0, 2])
def test_sum(root):
    assert world().allreduce(world().rank + root) == 1 + 2 * root
    open(f"pid-{world().rank}", "w").write(str(os.getpid()))

@pytest.mark.mpi(1)
def test_one():
    assert world().size == 1

def test_parent():
    assert "mpi4py" not in sys.modules
"""
    outcomes, output = run(program, "test_second.py")
    assert "PASSED test_second.py::test_the_same_processes" in output
    names = ["test_sum[0]", "test_sum[2]", "test_one", "test_parent"]
    assert outcomes == dict.fromkeys(names, "PASSED"), output


def test_a_failure_on_one_rank_is_a_failure_and_the_rest_still_runs(wrong):
    """Rank 0 waits for ever for the rank that raised; the message names both, and the next test is not disturbed."""
    outcomes, output, folder = wrong
    assert [outcomes[f"test_{name}"] for name in ("before", "raises", "after")] == ["PASSED", "FAILED", "PASSED"], (
        output
    )
    assert "on rank 1 ====" in output
    assert "ValueError: only rank 1" in output
    assert "printed before" in output
    assert "rank [0] still in the test 2 s after that failure" in output
    assert "in test_raises" in output  # rank 0's stack
    left = (folder / "shared_memory.txt").read_text().split()
    assert not any(Path(name).exists() for name in left)


def test_a_hanging_test_ends_at_its_timeout_with_the_stacks_of_all_ranks(wrong):
    outcomes, output, _ = wrong
    assert outcomes["test_hangs"] == "FAILED", output
    assert "timeout: rank [0] still in the test after 1.5 s" in output
    assert "in waits_for_rank_1" in output


def test_a_rank_that_dies_fails_its_test_only(wrong):
    outcomes, output, _ = wrong
    assert outcomes["test_dies"] == "FAILED", output
    assert "ended without a result" in output


def test_ranks_that_disagree_fail(wrong):
    outcomes, output, _ = wrong
    assert outcomes["test_skips_on_one"] == "FAILED", output
    assert "the ranks disagree" in output
    assert "1 skipped" in output


def test_comm_is_a_communicator_that_must_be_left_empty(wrong):
    outcomes, output, _ = wrong
    found = [outcomes[f"test_{name}"] for name in ("exchange", "never_received", "alone")]
    assert found == ["PASSED", "FAILED", "ERROR"], output
    assert "UnmatchedMessageError" in output
    assert "mark the test with @pytest.mark.mpi(n)" in output


def test_ranks_that_do_not_end_after_all_tests_are_a_failure(run):
    program = """
@pytest.mark.mpi(2)
def test_leaves_something():
    import atexit
    atexit.register(time.sleep, 20 * world().rank)

def test_parent():
    import tests.mpi_runner
    tests.mpi_runner.STARTUP_TIMEOUT = 1
"""
    outcomes, output = run(program)
    assert outcomes == {"test_leaves_something": "ERROR", "test_parent": "PASSED"}, output
    assert "all tests ended but the ranks did not" in output


@pytest.mark.exhaustive
def test_hypothesis_is_refused(run):
    program = """
from hypothesis import given, strategies

@pytest.mark.mpi(2)
@given(strategies.integers())
def test_drawn(number):
    pass
"""
    _, output = run(program)
    assert "hypothesis would draw apart on the ranks" in output


@pytest.mark.exhaustive
def test_a_launcher_of_another_library_is_named(run, tmp_path):
    """Then every process is rank 0 of 1 and a test about two ranks would pass without testing anything."""
    launcher = tmp_path / "bin" / "mpiexec"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\n[ "$1" = -n ] || exit\nshift 2\n"$@" & "$@"\nwait\n')
    launcher.chmod(0o755)
    source = "\n@pytest.mark.mpi(2)\ndef test_vacuous():\n    pass\n"
    outcomes, output = run(f"import tests.mpi_runner as r; r.mpiexec = lambda: {str(launcher)!r}\n" + source)
    assert outcomes == {"test_vacuous": "FAILED"}, output
    assert "asked for 2 ranks, but MPI says that this is rank 0 of 1" in output


@pytest.mark.exhaustive
def test_without_mpiexec_the_tests_are_skipped_with_the_remedy(run):
    source = "\n@pytest.mark.mpi(2)\ndef test_two():\n    pass\n"
    _, output = run("import tests.mpi_runner as r; r.mpiexec = lambda: None\n" + source)
    assert "1 skipped" in output
    assert "mpiexec is not installed: pip install 'minidist[mpi]'" in output
