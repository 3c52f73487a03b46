"""One way to start a program in any world.

    python program.py --ranks 4            four virtual ranks in this process
    mpiexec -n 4 python program.py         four processes, this one a rank of them

Process settings (BLAS threads, memory allocator) are made here, never at import.

Proved by: tests/comm/mpi/test_failures.py, tests/test_mpi_examples.py
"""

import difflib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.base.errors import MinidistError, UsageError, nearest, quoted, quoted_path
from minidist.base.interrupts import EXIT_CODE, interrupted
from minidist.base.limits import check_ranks
from minidist.base.process import flush_at_the_end, tune_process
from minidist.comm.launched import launched_size
from minidist.comm.program_lines import lines_of

if TYPE_CHECKING:
    import argparse

    from minidist.base.traces import Trace
    from minidist.comm.sim.sim_world import SimWorld


def launch(
    main: Callable[..., Any],
    *arguments: Any,
    ranks: int | None = None,
    argv: Sequence[str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run `main(comm, *arguments)` on every rank; return the results of the ranks in this process.

    Reads `--ranks`, `--timeout`, `--trace`, `--eager-bytes`, `--synchronous`, `--no-check-buffers` and `--traceback`
    from the command line and leaves everything else to the program. An error on any rank ends the whole job with one
    report: exit code 2 for wrong input, else 1. `sys.exit()` returns from a rank, `sys.exit(code)` ends the run. Never
    call `os._exit` in a rank: it leaves no chance to report, the launcher decides what becomes of the other ranks, and
    may report success.
    """
    # The program's own documentation comes first in the help.
    words = list(sys.argv[1:] if argv is None else argv)
    flags, rest = parser().parse_known_args(words)
    if flags.help:
        print((sys.modules["__main__"].__doc__ or "").strip() + "\n")
        parser().print_help()
        return []

    if flags.no_check_buffers:
        options["checks"] = "headers"
    # Also for the reports of the other places that end a run.
    if flags.traceback:
        os.environ["MINIDIST_TRACEBACK"] = "1"

    # One report for each kind of end; a traceback only for errors that are not ours.
    try:
        for word in rest:
            if is_mistyped(word):
                raise UsageError(f"unknown flag {word}{nearest(word.split('=')[0], FLAGS)}")
        return execute(
            main,
            *arguments,
            ranks=ranks if flags.ranks is None else flags.ranks,
            timeout=flags.timeout,
            trace=flags.trace,
            eager_bytes=flags.eager_bytes,
            synchronous=flags.synchronous,
            **options,
        ).local
    except SystemExit as end:
        for note in getattr(end, "__notes__", ()):
            print(f"minidist: SystemExit {end.code} {note}; the run ends", file=sys.stderr)
        raise
    except KeyboardInterrupt as end:
        print(interrupted(end), file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)
    except MinidistError as error:
        from minidist.comm.mpi.start import refuse

        refuse("minidist: " + "\n  ".join(lines_of(error)), error.exit_code)
    except Exception as error:
        from minidist.comm.tracebacks import print_at_the_end

        print_at_the_end(error)
        raise


def parser() -> "argparse.ArgumentParser":
    """Return the parser of the flags that every program started by `launch` understands."""
    import argparse

    result = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    result.add_argument("--help", "-h", action="store_true", help="show this and leave")
    result.add_argument("--ranks", type=int, help="virtual ranks; not under mpiexec")
    result.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent rank is reported")
    result.add_argument("--trace", help="write the trace to this file; none: keep no events")
    result.add_argument("--eager-bytes", type=int, default=0, help="simulated: sends up to this size are buffered")
    result.add_argument("--synchronous", action="store_true", help="every send waits for its receive")
    result.add_argument(
        "--no-check-buffers", action="store_true", help="leave out the watch on buffers of nonblocking messages"
    )
    result.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    return result


MARKED = 4096  # bytes at each end of a file in which a mark says that minidist has written it
MAX_TIMEOUT_S = 1e9  # more than thirty years; the longest time that a thread can wait is near it
FLAGS = ("--ranks", "--timeout", "--trace", "--eager-bytes", "--synchronous", "--no-check-buffers", "--traceback")


def is_mistyped(word: str) -> bool:
    """Return whether an unknown flag is nearly one of ours. Any other is the program's own."""
    name = word.split("=")[0]
    return name.startswith("--") and bool(difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.85))


def writable(path: str | Path, flag: str = "--trace", begins: str | None = None, mark: str = "") -> None:
    """Make the folder of the file of `flag`; raise UsageError now, not after the run, when it cannot be written.

    begins: how every file of this kind begins; as a trace does, unless it is given. mark: what every such file has in
    its first or last MARKED bytes. An existing file without them is a user's own, which must not be overwritten:
    UsageError.
    """
    path, found, ends = Path(path), b"", b""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A device or a pipe has nothing to lose, and reading it could block.
        if path.is_file():
            with path.open("rb") as file:
                found = file.read(MARKED)
                file.seek(max(0, path.stat().st_size - MARKED))
                ends = file.read()
        with path.open("a"):
            pass
    except OSError as error:
        raise UsageError(
            f"the {flag[2:]} cannot be written to {quoted_path(path, marks=False)}: {error.strerror}; choose another"
            f" {flag}"
        ) from None

    # A killed run may have left only a part of the beginning.
    if begins is None:
        from minidist.base.trace_file import TRACE_BEGINS

        begins = TRACE_BEGINS
    beginning, marked = found[: len(begins)], not found or mark.encode() in found or mark.encode() in ends
    if not begins.encode().startswith(beginning) or not marked:
        raise UsageError(
            f"{flag} {quoted_path(path)} exists already and is not a file that minidist has written there; choose"
            f" another {flag}, or remove that file"
        )


def under_mpiexec() -> bool:
    """Return whether a launcher has started this process."""
    return launched_size() is not None


@dataclass
class Outcome:
    """What a run returns.

    results, traces: of all ranks, in rank order; under MPI on rank 0 only, elsewhere they are empty.
    """

    world: str  # "simulated" | "mpi"
    size: int
    local: list[Any]  # results of the ranks in this process
    results: list[Any]
    traces: "list[Trace]"
    end_time: float | None = None  # virtual seconds until the last rank is done; None under MPI
    uneven: Collection[str] = ()  # calls whose end is an upper bound, of folded ranks: see `FoldedWorld`

    @property
    def is_root(self) -> bool:
        """Whether this is the process that prints."""
        return bool(self.results)


def execute(
    main: Callable[..., Any],
    *arguments: Any,
    ranks: int | None = None,
    timeout: float = 60.0,
    trace: str | None = None,
    eager_bytes: int = 0,
    synchronous: bool = False,
    simulated: "Callable[..., SimWorld] | None" = None,
    equal: Callable[[], Mapping[str, Any]] | None = None,
    **options: Any,
) -> Outcome:
    """Run on every rank; gather results and traces. An error is raised in the simulated world, and ends an MPI job.

    simulated: what makes the world of virtual ranks; None: `SimWorld`. equal: returns the settings, by name, that
    must be the same in all processes of mpiexec; the processes compare them before `main` runs.
    """
    tune()
    flush_at_the_end()

    size = launched_size()
    check_options(size, ranks, timeout, eager_bytes, synchronous)
    if trace == "none":
        trace, options = None, {"record": "totals", **options}
    if trace:
        writable(trace)

    # Without a launcher the ranks are virtual; under one, this process is one of them.
    if size is None:
        # Many commands import this file, and only some of them start ranks.
        from minidist.comm.sim.sim_world import SimWorld

        world = (simulated or SimWorld)(
            1 if ranks is None else ranks, timeout=timeout, eager_bytes=eager_bytes, **options
        )
        try:
            results = world.run(main, *arguments)
        except KeyboardInterrupt as error:
            if world.place:
                error.add_note(f"in {world.place}")
            raise
        except Exception as error:
            if trace:  # the picture of a deadlock is drawn from what was recorded up to it
                _write(trace, world.traces, world="simulated", incomplete=f"the run ended with {type(error).__name__}")
            raise
        outcome = Outcome("simulated", world.size, results, results, world.traces, world.end_time, world.uneven)
    else:
        # Only a rank of mpiexec loads the other world.
        from minidist.comm.mpi.agreement import agreed
        from minidist.comm.mpi.execute import execute_mpi

        main = main if equal is None else partial(agreed, equal(), main)
        size, local, by_rank = execute_mpi(main, arguments, timeout=timeout, synchronous=synchronous, **options)
        outcome = Outcome("mpi", size, local, [result for result, _ in by_rank], [trace for _, trace in by_rank])
    if trace and outcome.is_root:
        _write(trace, outcome.traces, world=outcome.world)
    return outcome


def check_options(size: int | None, ranks: int | None, timeout: float, eager_bytes: int, synchronous: bool) -> None:
    """Raise UsageError for options that no run can have, before any rank starts. size: of mpiexec's job, or None."""
    if not 0 <= timeout <= MAX_TIMEOUT_S:
        raise UsageError(
            f"--timeout {timeout:g}; it must be at least 0 seconds (0: never report) and at most {MAX_TIMEOUT_S:g}"
        )
    if eager_bytes < 0:
        raise UsageError(f"--eager-bytes {eager_bytes}; it must be at least 0")
    if eager_bytes and synchronous:
        raise UsageError(
            f"--synchronous lets every send wait for its receive, and --eager-bytes {eager_bytes} lets short ones go"
            " on; leave one of them out"
        )
    if ranks is not None:
        if not isinstance(ranks, int) or ranks < 1:
            raise UsageError(f"--ranks {quoted(ranks)}; a world needs at least 1 rank")
        check_ranks(ranks)
    if size is not None and eager_bytes:
        raise UsageError(
            f"--eager-bytes {eager_bytes} is of simulated ranks; under mpiexec the MPI library decides which sends are"
            " buffered: leave it out, or let every send wait for its receive with launch's --synchronous"
        )
    if size is not None and ranks is not None and ranks != size:
        raise UsageError(
            f"--ranks {ranks} under an mpiexec that started {size} processes; leave --ranks out, mpiexec decides"
        )


def _write(path: str, traces: "list[Trace]", **header: Any) -> None:
    # A run without a file loads nothing that writes one.
    from minidist.base.trace_file import write_traces

    write_traces(path, traces, **header)


def tune() -> None:
    """Set one BLAS thread per rank, unless the user chose a number, and an allocator that keeps memory."""
    names = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"}
    tune_process(1 if names.isdisjoint(os.environ) else None)
