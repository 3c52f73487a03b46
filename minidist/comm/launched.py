"""What the launcher says of this process, asked before MPI is imported; and whether launcher and library belong
together.
"""

import os
from typing import Any

from minidist.base.errors import LauncherError


def import_mpi() -> Any:
    """mpi4py's MPI module, imported at the first use (0.1 to 1 s), or one sentence that says how to get it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(f"MPI is not available ({error}); install it with: pip install 'minidist[mpi]'") from None
    return MPI


def launched_size(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> int | None:
    """How many processes the launcher says it started; None when there is no launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MINIDIST_SIZE"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def launched_rank(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> int:
    """Which of the launcher's processes this is; 0 when there is no launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "MINIDIST_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def check_launcher(size: int, library: str) -> None:
    """Launcher and library of two different MPIs make every process rank 0 of 1, and everything passes vacuously."""
    expected = launched_size()
    if expected is not None and expected != size:
        raise LauncherError(
            f"the launcher started {expected} processes but {library} sees {size}: they belong to different MPI "
            "installations; use the mpiexec that came with this library (minidist doctor shows both)"
        )
