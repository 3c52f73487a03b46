"""The examples are the same programs in both worlds: each is run with --ranks and with mpiexec."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.lesson.mpi_leg import mpiexec

ROOT = Path(__file__).resolve().parents[1]
needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
WORLDS = ["simulated", pytest.param("mpi", marks=needs_mpi)]


def start(world, ranks, name, *flags):
    """(exit code, output) of an example."""
    program = [sys.executable, f"mpi_examples/{name}.py", *flags]
    command = [mpiexec(), "-n", str(ranks), *program] if world == "mpi" else [*program, "--ranks", str(ranks)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }  # fmt: skip
    process = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return process.returncode, process.stdout


@pytest.mark.parametrize("world", WORLDS)
def test_hello(world):
    code, output = start(world, 3, "hello")
    assert code == 0, output
    assert sorted(output.splitlines()) == [f"rank {rank} of 3" for rank in range(3)] + ["squares: [0, 1, 4]"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ring_all_reduce(world, ranks):
    code, output = start(world, ranks, "ring_all_reduce")
    assert code == 0, output
    assert "max |ours - expected| = 0\nmax |ours - library| = 0\n" in output
    numbers = [word for word in output.splitlines()[2].split() if word[0].isdigit()][1:]
    assert len(numbers) == 3
    assert len(set(numbers)) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_ping_pong(world):
    code, output = start(world, 3, "ping_pong")
    assert code == 0, output
    assert len(output.splitlines()) == 4
    if world == "simulated":
        assert "1,000,000 B    101.00 µs" in output  # alpha + beta * bytes


@pytest.mark.parametrize("world", WORLDS)
def test_ping_pong_deadlocks_and_says_where(world):
    code, output = start(world, 2, "ping_pong", "--deadlock", "--synchronous", "--timeout", "1")
    assert code == 1, output
    assert "circle: rank 0 -> rank 1 -> rank 0" in output
    assert "ping_pong.py:" in output


def test_one_rank_is_too_few_for_a_ping_pong():
    code, output = start("simulated", 1, "ping_pong")
    assert code == 2
    assert "--ranks 2" in output
