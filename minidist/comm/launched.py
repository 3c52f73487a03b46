"""How many processes the launcher started, and which of them this is, before MPI is started.

Every launcher sets environment variables. They are compared with what the MPI library says, because with a launcher and
a library of two different MPIs every process is rank 0 of 1, and a program passes every check because it compares
nothing; or the process ends inside MPI_Init, with a long message about PMIx.

Proved by: tests/comm/mpi/test_start.py, tests/comm/mpi/test_failures.py
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minidist.base.errors import reason
from minidist.comm.errors import LauncherError

# (rank, number of processes): the variables of Open MPI, of PMI (MPICH, Intel MPI, srun --mpi=pmi2) and of MVAPICH, and
# what a user sets where nothing else does. Slurm's own come last, because an mpiexec inside a Slurm job inherits them.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
_VARIABLES = (*_LAUNCHERS, ("MINIDIST_RANK", "MINIDIST_SIZE"))


def load_mpi() -> Any:
    """Return mpi4py's MPI module without starting MPI (0.1 s at the first use); LauncherError says how to get it."""
    try:
        import mpi4py

        # Its import would start MPI, where nothing can be checked or timed. The end of the process still ends MPI.
        if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize:
            mpi4py.rc.initialize = False
            if mpi4py.rc.finalize is None:
                mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI library
        raise LauncherError(
            f"MPI is not available ({reason(error)}); install it with: pip install 'minidist[mpi]'"
        ) from None
    return MPI


def launched_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes the launcher says it started; None when there is no launcher."""
    for _, size in _VARIABLES:
        if environment.get(size, "").isdigit():
            return int(environment[size])

    # srun tells each process the size of its step. SLURM_NTASKS is set in a batch script, too, which is one process;
    # a step of one task is most often a shell.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if environment.get("SLURM_PROCID", "").isdigit() and tasks.isdigit() and int(tasks) > 1:
        return int(tasks)
    return None


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return which of the launcher's processes this is; 0 when there is no launcher."""
    for rank, _ in _VARIABLES:
        if environment.get(rank, "").isdigit():
            return int(environment[rank])
    return int(environment["SLURM_PROCID"]) if environment.get("SLURM_PROCID", "").isdigit() else 0


def has_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a process of MPI's launcher has started this one, so that it must not outlive its parent."""
    return any(environment.get(rank, "").isdigit() for rank, _ in _LAUNCHERS)


def check_family(library: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise LauncherError when the variables show a launcher of another MPI than the library's.

    To be asked before MPI starts: MPICH ends the process with a page of PMIx's errors under Open MPI's mpiexec.
    MPI4PY_CHECK_MPIEXEC=0 is mpi4py's way to say that the two belong together all the same.
    """
    if environment.get("MPI4PY_CHECK_MPIEXEC", "1").lower() in ("0", "no", "off", "false", "n"):
        return
    open_mpi, hydra = "OMPI_COMM_WORLD_SIZE" in environment, "HYDI_CONTROL_FD" in environment
    name = " ".join(library.replace("\0", "").split(",")[0].splitlines()[0].split())[:60]
    launcher = ""
    if open_mpi and "PMI_SIZE" not in environment and "Open MPI" not in library:
        launcher = "Open MPI's mpiexec"
    elif hydra and not open_mpi and "Open MPI" in library:
        launcher = "MPICH's mpiexec"
    if launcher:
        near = Path(sys.executable).parent / "mpiexec"
        right = near if near.exists() else "the mpiexec that came with this library"
        raise LauncherError(
            f"{launcher} started {launched_size(environment)} processes, but the MPI library of this Python is {name}:"
            f" they belong to different MPI installations; use {right} (minidist doctor shows both)"
        )


def check_launcher(size: int, library: str) -> None:
    """Raise LauncherError when the launcher started another number of processes than the library sees."""
    expected = launched_size()
    if expected is not None and expected != size:
        raise LauncherError(
            f"the launcher started {expected} processes but {library} sees {size}: they belong to different MPI "
            "installations; use the mpiexec that came with this library (minidist doctor shows both)"
        )
