"""Starts a program under mpiexec, as a user would, for the tests in this folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi_runner import is_open_mpi, mpiexec

ROOT = Path(__file__).parents[3]
PREAMBLE = """
import os, sys, time
import numpy as np
from minidist.comm import launch
from minidist.core.comm import ANY
from minidist.core.collectives import all_reduce, broadcast
def one(value=0.0):
    return np.array([float(value)])
"""
# Rank 0 sends a message that rank 1 never receives.
UNRECEIVED = """
def main(comm):
    if comm.rank == 0:
        comm.send(one(), 1)
"""


@pytest.fixture
def run(tmp_path):
    """run(source, ranks, *flags, code=0) -> output of a program that ends with this exit code (None: any but 0).

    Its last line calls launch(main). run.ended returns (exit code, output).
    """
    pytest.importorskip("mpi4py.rc", reason="mpi4py is not installed")
    if mpiexec() is None:
        pytest.skip("mpiexec is not installed: pip install 'minidist[mpi]'")
    options = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi() else []

    def start(source, ranks, *flags, environment=(), launcher=True, last="launch(main)", merged=False):
        program = tmp_path / "program.py"
        program.write_text(f"{PREAMBLE}{source}\n{last}\n")
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        variables |= dict(environment)
        command = [mpiexec(), *options, "-n", str(ranks)] if launcher else []
        return subprocess.Popen(
            [*command, sys.executable, program, *flags],
            env=variables,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
        )

    def ended(*arguments, timeout=120, **settings):
        with start(*arguments, **settings) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, output + errors

    def run(*arguments, code=0, **settings):
        found, output = ended(*arguments, **settings)
        assert found if code is None else found == code, output
        return output

    def interrupted(marker, *arguments, **settings):
        """Send SIGINT when the program has printed a line with `marker`; return code, output, seconds until the end."""
        with start(*arguments, merged=True, **settings) as process:
            for line in process.stdout:
                if marker in line:
                    break
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, output, time.monotonic() - began

    run.ended, run.interrupted = ended, interrupted
    run.open_mpi = bool(options)
    run.line = lambda text: (tmp_path / "program.py").read_text().split(text)[0].count("\n") + 1
    return run
