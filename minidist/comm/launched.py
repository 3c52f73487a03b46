"""How many processes the launcher started, and which of them this is, before MPI is imported.

Every launcher sets environment variables. They are compared with what the MPI library says, because a launcher and a
library of two different MPIs make every process rank 0 of 1, and every check passes vacuously.

Proved by: tests/comm/mpi/test_failures.py
"""

import os
from typing import Any

from minidist.base.errors import LauncherError


def import_mpi() -> Any:
    """Return mpi4py's MPI module, imported at the first use (0.1 to 1 s); LauncherError says how to get it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(f"MPI is not available ({error}); install it with: pip install 'minidist[mpi]'") from None
    return MPI


def launched_size(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> int | None:
    """Return how many processes the launcher says it started; None when there is no launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MINIDIST_SIZE"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def launched_rank(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> int:
    """Return which of the launcher's processes this is; 0 when there is no launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "MINIDIST_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def check_launcher(size: int, library: str) -> None:
    """Raise LauncherError when the launcher and the library belong to two different MPIs."""
    expected = launched_size()
    if expected is not None and expected != size:
        raise LauncherError(
            f"the launcher started {expected} processes but {library} sees {size}: they belong to different MPI "
            "installations; use the mpiexec that came with this library (minidist doctor shows both)"
        )
