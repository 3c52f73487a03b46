"""One way to start a program in any world.

    python program.py --ranks 4            four virtual ranks in this process
    mpiexec -n 4 python program.py         four processes, this one a rank of them

Process settings (BLAS threads, memory allocator) are made here, never at import.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from minidist.base.errors import MinidistError, UsageError
from minidist.base.trace import Trace, write_traces
from minidist.comm.mpi import MPIWorld, launched_size
from minidist.comm.simulated import SimWorld


def launch(
    main: Callable[..., Any], *arguments: Any, ranks: int | None = None, argv: Sequence[str] | None = None, **options: Any
) -> list[Any]:
    """Run `main(comm, *arguments)` on every rank; returns the results of the ranks in this process.

    Reads `--ranks`, `--timeout`, `--trace`, `--eager-bytes` and `--synchronous` from the command line and leaves everything
    else to the program. An error on any rank ends the whole job with one report: exit code 2 for wrong input, else 1.
    """
    flags, _ = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        return run(main, *arguments, ranks=flags.ranks or ranks, timeout=flags.timeout, trace=flags.trace,
                   eager_bytes=flags.eager_bytes, synchronous=flags.synchronous, **options)  # fmt: skip
    except MinidistError as error:
        print(f"minidist: {error}", *getattr(error, "__notes__", ()), sep="\n  ", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def parser() -> argparse.ArgumentParser:
    """The flags that every program started by `launch` understands."""
    result = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    result.add_argument("--ranks", type=int, help="virtual ranks; not under mpiexec")
    result.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent rank is reported")
    result.add_argument("--trace", help="write the trace to this file")
    result.add_argument("--eager-bytes", type=int, default=0, help="simulated: sends up to this size are buffered")
    result.add_argument("--synchronous", action="store_true", help="MPI: every send waits for its receive")
    return result


def under_mpiexec() -> bool:
    """Has a launcher started this process?"""
    return launched_size() is not None


def run(
    main: Callable[..., Any], *arguments: Any, ranks: int | None = None, timeout: float = 60.0, trace: str | None = None,
    eager_bytes: int = 0, synchronous: bool = False, **options: Any,
) -> list[Any]:  # fmt: skip
    """`launch` without the command line; errors are raised in the simulated world and end the job under MPI."""
    limit_blas_threads()
    size = launched_size()
    if size is None:
        world = SimWorld(ranks or 1, timeout=timeout, eager_bytes=eager_bytes, **options)
        results = world.run(main, *arguments)
        if trace:
            write_traces(trace, world.traces, world="simulated")
        return results
    if ranks is not None and ranks != size:
        raise UsageError(f"--ranks {ranks} under an mpiexec that started {size} processes; leave --ranks out, mpiexec decides")
    return run_mpi(main, *arguments, timeout=timeout, synchronous=synchronous, trace=trace)


def run_mpi(
    main: Callable[..., Any], *arguments: Any, timeout: float, synchronous: bool = False, trace: str | None = None, **options: Any
) -> list[Any]:
    """Be one rank. Any exception is printed with this rank's number and ends the whole job: no other rank is left waiting."""
    world = MPIWorld(timeout=timeout, synchronous=synchronous, **options)
    try:
        results = world.run(main, *arguments)
        if trace:
            gather_traces(world, trace)
        return results
    except BaseException as error:
        code = 0 if isinstance(error, SystemExit) and not error.code else 2 if isinstance(error, UsageError) else 1
        if isinstance(error, SystemExit) and code == 0:
            raise
        if isinstance(error, MinidistError):
            place = "" if str(error).startswith(f"rank {world.rank}:") else f"rank {world.rank}: "
            print(f"minidist: {place}{error}", file=sys.stderr, flush=True)
        else:
            text = traceback.format_exc()
            print(f"minidist: rank {world.rank} of {world.size} raised; the job ends.\n{text}", file=sys.stderr, flush=True)
        if world.watchdog:
            world.watchdog.write()
        world.MPI.COMM_WORLD.Abort(code)
        os._exit(code)  # some libraries return from Abort


def gather_traces(world: MPIWorld, path: str) -> list[Trace] | None:
    """Rank 0 collects all traces and writes the file (not part of the trace itself)."""
    traces: list[Trace] | None = world.base.gather(world.trace)
    if traces is not None:
        write_traces(path, traces, world="mpi")
    return traces


def limit_blas_threads(threads: int = 1) -> None:
    """One BLAS thread a rank, unless the environment already says otherwise: more ranks than cores would crawl."""
    if "OPENBLAS_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in os.environ:
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)
