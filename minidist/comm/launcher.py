"""Finds and calls `mpiexec`: the one that belongs to the MPI library of this Python's mpi4py.

Every MPI's launcher takes `-n 4 program`; the rest differs. Open MPI refuses more ranks than cores, binds each rank to
its own core and does not run as root, unless told otherwise; MPICH and Intel MPI need nothing.

Proved by: tests/comm/mpi/test_failures.py
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from minidist.comm.errors import LauncherError


def find_mpiexec() -> str:
    """Return mpiexec's path: next to this Python (a wheel puts it there), else on PATH; LauncherError without one."""
    near = Path(sys.executable).parent / "mpiexec"
    found = str(near) if near.exists() else shutil.which("mpiexec")
    if found is None:
        raise LauncherError(
            "mpiexec is missing; install it with: pip install 'minidist[mpi]' (a wheel, no compiler needed)"
        )
    return found


@cache
def launcher_version(mpiexec: str) -> str:
    """Return what `mpiexec --version` says of itself, on one line."""
    # Hydra prints a table, Open MPI one line.
    answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    text = (answer.stdout or answer.stderr).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("HYDRA" in line for line in lines):
        version = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Version:")), "")
        return f"MPICH Hydra {version}".strip()
    return lines[0] if lines else "unknown"


def is_open_mpi() -> bool:
    """Return whether mpiexec is Open MPI's."""
    version = launcher_version(find_mpiexec())
    return "Open MPI" in version or "OpenRTE" in version


def mpiexec_command(ranks: int, program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment that start `program` (after the interpreter) on `ranks` processes."""
    mpiexec = find_mpiexec()
    environment = {**os.environ, "MINIDIST_SIZE": str(ranks)}  # a launcher of another MPI then is noticed at once
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")

    # Open MPI alone needs options: to start more ranks than cores, to leave them unbound, and to run as root.
    options: list[str] = []
    if is_open_mpi():
        options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpiexec, *options, "-n", str(ranks), sys.executable, *program], environment


def run_under_mpiexec(
    ranks: int, program: Sequence[str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Start `program` on `ranks` processes, let its standard error through, and return when it has ended.

    Raises LauncherError when it failed.
    """
    command, environment = mpiexec_command(ranks, program)
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout)
    if answer.returncode:
        raise LauncherError(
            f"{' '.join(command[:4])} ... ended with exit code {answer.returncode}; see its report above"
        )
    return answer
