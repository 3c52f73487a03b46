"""What this machine has, and what is missing for what: the first thing to look at when something does not start."""

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from minidist import __version__
from minidist.base.errors import LauncherError
from minidist.base.process import tune_process
from minidist.comm.launcher import find_mpiexec, launcher_version
from minidist.commands.output import Result, json_or_table


@json_or_table
def doctor() -> Result:
    """What this machine has: Python, BLAS, MPI and its launcher, GPU; and what is missing for what."""
    findings = examine()

    def show() -> None:
        for finding in findings:
            print(f"{'ok ' if finding.ok else '-- '} {finding.name:12} {finding.text}")

    return Result([vars(finding) for finding in findings], show)


@dataclass
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    text: str


def examine() -> list[Finding]:
    """Look at everything once. Importing the MPI library happens in here and nowhere before."""
    return [
        Finding("minidist", True, f"{__version__}, Python {platform.python_version()} at {sys.executable}"),
        _blas(),
        Finding("cores", True, f"{len(os.sched_getaffinity(0))} usable by this process"),
        _memory(),
        *_mpi(),
        _gpu(),
        _package("torch", "comparisons in `minidist bench` (pip install 'minidist[peers]')"),
        _package("jupytext", "building lessons (pip install 'minidist[lessons]')"),
    ]


def _blas() -> Finding:
    import numpy as np
    from threadpoolctl import threadpool_info

    pools = [
        f"{p['internal_api']} {p.get('version')} {p.get('architecture', '')}, {p['num_threads']} threads"
        for p in threadpool_info()
    ]
    kernel = os.environ.get("OPENBLAS_CORETYPE", "not set")
    return Finding("blas", True, f"numpy {np.__version__}; {'; '.join(pools)}; OPENBLAS_CORETYPE {kernel}")


def _memory() -> Finding:
    kept = bool(tune_process(None)["keep_memory"])
    return Finding(
        "allocator",
        kept,
        "freed memory is kept (glibc)" if kept else "freed memory goes back to the system: steps are slower",
    )


def _mpi() -> list[Finding]:
    if importlib.util.find_spec("mpi4py") is None:
        return [Finding("mpi", False, "mpi4py is missing; for mpiexec: pip install 'minidist[mpi]'")]
    try:
        mpiexec = find_mpiexec()
        launcher = Finding("mpiexec", True, f"{launcher_version(mpiexec)} at {mpiexec}")
    except LauncherError as error:
        launcher = Finding("mpiexec", False, str(error))
    try:
        from mpi4py import MPI

        library = " ".join(MPI.Get_library_version().replace("\0", "").split(",")[0].splitlines()[0].split())
    except ImportError as error:
        return [Finding("mpi", False, f"mpi4py does not find its MPI library: {error}"), launcher]
    same = ("MPICH" in library) == ("MPICH" in launcher.text) or not launcher.ok
    if not same:
        launcher = Finding(
            "mpiexec", False, f"{launcher.text}: not the launcher of {library}; every process would be rank 0 of 1"
        )
    return [Finding("mpi", True, library.splitlines()[0][:80]), launcher]


def _gpu() -> Finding:
    if importlib.util.find_spec("cupy") is None:
        return Finding("gpu", False, "no CuPy; everything runs on NumPy (for a GPU: pip install 'minidist[cuda]')")
    import cupy

    if not cupy.cuda.is_available():
        return Finding("gpu", False, f"CuPy {cupy.__version__} sees no GPU; everything runs on NumPy")
    return Finding("gpu", True, f"CuPy {cupy.__version__}, {cupy.cuda.runtime.getDeviceCount()} GPU(s)")


def _package(name: str, use: str) -> Finding:
    try:
        return Finding(name, True, f"{version(name)}, for {use.split(' (')[0]}")
    except PackageNotFoundError:
        return Finding(name, False, f"not installed; only needed for {use}")
