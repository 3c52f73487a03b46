"""`minidist doctor`: what this machine has, and what is missing for what.

It is the first thing to look at when something does not start. Under a launcher (`mpiexec -n 4 minidist doctor`) all
ranks report, and rank 0 prints what they found together: who started them, on which hosts, with which software, how
many cores and BLAS threads each has, how fast their messages are, and which collectives `algorithm="auto"` takes.
docs/clusters.md says how to read it.

Proved by: tests/commands/test_doctor.py
"""

import importlib.util
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from minidist import __version__
from minidist.base.cache import folder
from minidist.base.errors import ranges_text
from minidist.base.process import keep_freed_memory, usable_cores
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.tuning import BUDGET, TRANSPORT, entry_of, kept_times
from minidist.comm.errors import LauncherError
from minidist.comm.launched import check_family, load_mpi
from minidist.comm.launcher import find_mpiexec, launcher_version
from minidist.comm.mpi.start import Starting, start_limit
from minidist.commands.command import Result, json_or_table


@dataclass
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    text: str


@json_or_table
def doctor() -> Result | None:
    """Print what this machine has (Python, BLAS, MPI, its launcher, GPU), and what is missing for what.

    Under mpiexec it also prints what the ranks see of each other.
    """
    findings = examine()
    if findings is None:
        return None

    def show() -> None:
        for finding in findings:
            print(f"{'ok ' if finding.ok else '-- '} {finding.name:12} {finding.text}")

    return Result([vars(finding) for finding in findings], show)


def examine() -> list[Finding] | None:
    """Return all findings, or None on ranks other than 0. Nothing imports the MPI library before this."""
    together = ranks_together()
    if together is None:
        return None
    return [
        Finding("minidist", True, f"{__version__}, Python {platform.python_version()} at {sys.executable}"),
        _blas(),
        Finding("cores", True, f"{len(usable_cores())} usable by this process"),
        _memory(),
        *_mpi(),
        *together,
        _gpu(),
        _package("torch", "`minidist torch` (pip install 'minidist[torch]') and comparisons in `minidist bench`"),
        _package("jupytext", "building lessons (pip install 'minidist[lessons]')"),
    ]


# --- this machine -----------------------------------------------------------------------------------------------------


def _blas() -> Finding:
    import numpy as np
    from threadpoolctl import threadpool_info

    from minidist.base import mkl

    pools = [
        f"{p['internal_api']} {p.get('version')} {p.get('architecture', '')}, {p['num_threads']} threads"
        for p in threadpool_info()
    ]
    # The kernel is chosen by the processor's type, and bits depend on it.
    kernel = os.environ.get("OPENBLAS_CORETYPE", "not set")
    text = f"numpy {np.__version__}; {'; '.join(pools)}; OPENBLAS_CORETYPE {kernel}"
    if mkl.library() is not None:
        text += f"; a product of MKL takes {mkl.time_of_mkl():.2f} of the time, MINIDIST_BLAS=mkl uses it"
    return Finding("blas", True, text)


def _memory() -> Finding:
    kept = keep_freed_memory()
    return Finding(
        "allocator",
        kept,
        "freed memory is kept (glibc)" if kept else "freed memory goes back to the system: steps are slower",
    )


def _mpi() -> list[Finding]:
    if importlib.util.find_spec("mpi4py") is None:
        return [Finding("mpi", False, "mpi4py is missing; for mpiexec: pip install 'minidist[mpi]'")]
    # [1] The launcher: is there one, and whose?
    try:
        mpiexec = find_mpiexec()
        launcher = Finding("mpiexec", True, f"{launcher_version(mpiexec)} at {mpiexec}")
    except LauncherError as error:
        launcher = Finding("mpiexec", False, str(error))

    # [2] The library that mpi4py loads.
    try:
        library = _library(load_mpi())
    except LauncherError as error:
        return [Finding("mpi", False, f"mpi4py does not find its MPI library: {error}"), launcher]

    # [3] Do they belong together? A launcher of the other kind starts ranks that do not find each other.
    same = ("MPICH" in library) == ("MPICH" in launcher.text) or not launcher.ok
    if not same:
        launcher = Finding(
            "mpiexec", False, f"{launcher.text}: not the launcher of {library}; every process would be rank 0 of 1"
        )
    return [Finding("mpi", True, library), launcher]


def _library(MPI: Any) -> str:
    """Return the name and the version of the MPI library, on one line."""
    first = MPI.Get_library_version().replace("\0", "").split(",")[0].splitlines()[0]
    return " ".join(first.split())[:80]


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


# --- all ranks of a launcher ------------------------------------------------------------------------------------------

# Launchers by the variables in which they tell a process its rank and the number of processes. Slurm's own come after
# PMI's: mpiexec inside a Slurm job inherits them from the step that started it.
LAUNCHERS = (
    ("Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH's mpiexec", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH's mpiexec or srun --mpi=pmi2", "PMI_RANK", "PMI_SIZE"),
    ("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class RankFacts:
    """What one rank sees of itself."""

    rank: int
    size: int  # as MPI counts
    host: str
    software: str
    cores: tuple[int, ...]  # that this process may use
    threads: int  # of its BLAS


def launcher_of(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return (launcher, rank, number of processes) as the environment tells them; None without a launcher."""
    for name, rank, size in LAUNCHERS:
        if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
            text = f"{name} ({rank} {environment[rank]}, {size} {environment[size]})"
            return text, int(environment[rank]), int(environment[size])
    return None


def launcher_finding(environment: Mapping[str, str], mpi_size: int) -> Finding:
    """Compare the number of processes that the launcher started with the one that MPI sees."""
    found = launcher_of(environment)
    if found is None:
        return Finding("launcher", True, "none, this is one process; for several: mpiexec -n 4 minidist doctor")

    # A process that MPI sees alone would train alone, and every comparison would pass.
    text, _, size = found
    if "torchrun" in text:
        return Finding("launcher", False, f"{text}; torchrun starts no MPI processes: use mpiexec or srun")
    if size != mpi_size:
        return Finding(
            "launcher",
            False,
            f"{text}; MPI sees {mpi_size}: launcher and MPI library do not belong together. Use the mpiexec in the"
            " directory of this Python, or srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)",
        )
    return Finding("launcher", True, f"{text}; MPI sees {mpi_size}")


def ranks_together() -> list[Finding] | None:
    """Return what all ranks found together; [] without MPI, None on ranks other than 0."""
    found = launcher_of(os.environ)
    if found is None or importlib.util.find_spec("mpi4py") is None:
        return [launcher_finding(os.environ, 1)]
    try:
        MPI = load_mpi()
        check_family(MPI.Get_library_version())
    except LauncherError as error:
        # MPI would end every process; one of them says why.
        return [Finding("launcher", False, f"{found[0]}; {error}")] if found[1] == 0 else None
    with Starting(start_limit()) as starting:
        starting.start_mpi()

    # All ranks get here: the allgather is collective, and the times need a partner of rank 0.
    world = MPI.COMM_WORLD
    facts: list[RankFacts] = world.allgather(_facts(MPI))
    messages = message_times(MPI, [fact.host for fact in facts])

    # Rank 0 reports. Ranks that MPI does not see together are all rank 0, and then the launcher's number decides.
    if world.rank != 0 or (world.size == 1 and found[1] != 0):
        return None
    return [
        launcher_finding(os.environ, world.size),
        *judge_ranks(facts),
        transport(MPI, messages),
        *collectives(MPI, facts),
    ]


def _facts(MPI: Any) -> RankFacts:
    import numpy as np
    from threadpoolctl import threadpool_info

    software = f"minidist {__version__}, Python {platform.python_version()}, numpy {np.__version__}, {_library(MPI)}"
    return RankFacts(
        MPI.COMM_WORLD.rank,
        MPI.COMM_WORLD.size,
        MPI.Get_processor_name(),
        f"{software} in {sys.prefix}",
        tuple(usable_cores()),
        max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1),
    )


def judge_ranks(facts: Sequence[RankFacts]) -> list[Finding]:
    """Return the findings on hosts, software and cores, of the facts of all ranks in rank order."""
    # {host: its ranks, in rank order}
    by_host: dict[str, list[RankFacts]] = {}
    for fact in facts:
        by_host.setdefault(fact.host, []).append(fact)

    hosts = ", ".join(f"{host} (ranks {ranges_text([fact.rank for fact in here])})" for host, here in by_host.items())
    findings = [Finding("hosts", True, f"{len(facts)} ranks on {hosts}")]

    # Every rank must run the same software, which a virtual environment on a shared disk guarantees.
    others = [fact for fact in facts if fact.software != facts[0].software]
    different = "" if not others else f"; rank {others[0].rank} on {others[0].host} has {others[0].software}"
    findings.append(Finding("software", not others, facts[0].software + (different or "; the same on all ranks")))

    # More BLAS threads than cores make ranks wait for each other.
    lines, enough = [], True
    for host, here in by_host.items():
        cores, threads = len(set().union(*(fact.cores for fact in here))), sum(fact.threads for fact in here)
        enough &= threads <= cores
        lines.append(f"{host}: {len(here)} ranks, {here[0].threads} BLAS threads each, on {cores} cores")
    remedy = "" if enough else "; start fewer ranks per host, or set OPENBLAS_NUM_THREADS=1"
    findings.append(Finding("cores/rank", enough, "; ".join(lines) + remedy))
    return findings


def message_times(MPI: Any, hosts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Measure messages between rank 0 and one rank on its host, and one on another host, where there are such ranks.

    Returns {where: (seconds of 8 bytes one way, bytes per second of 1 MiB)}, on rank 0.
    """
    import numpy as np

    world, result = MPI.COMM_WORLD, {}
    partners = {
        "on one host": next((rank for rank in range(1, world.size) if hosts[rank] == hosts[0]), None),
        "between hosts": next((rank for rank in range(1, world.size) if hosts[rank] != hosts[0]), None),
    }
    for where, partner in partners.items():
        if partner is None or world.rank not in (0, partner):
            continue

        # Medians of ping-pongs: 8 bytes show the latency, 1 MiB the bandwidth.
        times = []
        for nbytes, rounds in ((8, 100), (1 << 20, 20)):
            ball, other, seconds = np.zeros(nbytes, np.uint8), partner - world.rank, []
            for _ in range(rounds):
                began = time.perf_counter()
                if world.rank == 0:
                    world.Send(ball, other)
                    world.Recv(ball, other)
                else:
                    world.Recv(ball, 0)
                    world.Send(ball, 0)
                # A round trip is two messages.
                seconds.append((time.perf_counter() - began) / 2)
            times.append(float(np.median(seconds)))
        result[where] = (times[0], (1 << 20) / times[1])
    return result


def transport(MPI: Any, messages: Mapping[str, tuple[float, float]]) -> Finding:
    """Return what carries the messages, as far as library and environment tell, and how fast they are."""
    device = next(
        (line.split(":", 1)[1].strip() for line in MPI.Get_library_version().splitlines() if "Device" in line), ""
    )
    chosen = ", ".join(f"{name}={os.environ[name]}" for name in TRANSPORT if name in os.environ)
    measured = [
        f"{where} 8 B in {1e6 * seconds:.1f} us, 1 MiB at {rate / 1e9:.2f} GB/s"
        for where, (seconds, rate) in messages.items()
    ]
    return Finding("transport", True, "; ".join([*([device] if device else []), chosen or "chosen by MPI", *measured]))


def collectives(MPI: Any, facts: Sequence[RankFacts]) -> list[Finding]:
    """Return what `algorithm="auto"` chooses by, on these ranks and with checked messages, of each operation."""
    measured = []
    for operation in ALGORITHMS:
        hosts = [fact.host for fact in facts]
        place = entry_of(operation, hosts, MPI.Get_library_version(), nodes=None, checks=True, synchronous=False)
        times = kept_times(place, operation)
        if times is not None:
            measured.append(Finding(operation, True, f"measured: {times} (in {place.name})"))

    # Of those without a table.
    others = "each operation" if not measured else "each other operation"
    if os.environ.get("MINIDIST_TUNING") == "off":
        text, measured = 'MINIDIST_TUNING=off: algorithm="auto" chooses by formulas', []
    else:
        text = (
            f'the first algorithm="auto" of {others} measures it on these {len(facts)} ranks, in about {BUDGET:.0f} s,'
            f" and keeps the times in {folder()}; MINIDIST_TUNING=refresh measures anew"
        )
    return [Finding("auto", True, text), *measured] if len(facts) > 1 else []
