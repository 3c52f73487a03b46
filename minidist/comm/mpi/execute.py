"""One rank of `mpiexec`: it makes its world, runs the program, and sends its result and its trace to rank 0.

Proved by: tests/comm/mpi/test_failures.py, tests/comm/mpi/test_agreement.py
"""

import io
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from minidist.base.errors import MinidistError, MismatchError, UsageError, reason
from minidist.base.interrupts import EXIT_CODE, interruption
from minidist.base.traces import Trace
from minidist.comm.errors import BufferReuseError
from minidist.comm.mpi.start import give_up
from minidist.comm.mpi.waits import Returned
from minidist.comm.mpi.world import MPIWorld
from minidist.comm.program_lines import lines_of
from minidist.comm.tracebacks import note_call, traceback_of


def execute_mpi(
    main: Callable[..., Any], arguments: tuple[Any, ...], **options: Any
) -> tuple[int, list[Any], list[tuple[Any, Trace]]]:
    """Be one rank; return the number of ranks, this rank's results, and on rank 0 the result and trace of every rank.

    Any exception is printed with this rank's number and ends the whole job: no rank is left waiting.
    """
    whole_lines()

    # Wrong input, found before the world is made: `launch` or the command line tells the other ranks.
    try:
        world = MPIWorld(**options)
    except (MinidistError, SystemExit):
        raise
    except KeyboardInterrupt:
        give_up(interruption("the start of MPI"), EXIT_CODE)
    except Exception:
        give_up(f"the world cannot be made\n{traceback.format_exc()}", 1)

    # Then every error ends the job.
    try:
        try:
            local = world.run(main, *arguments)
        except SystemExit as end:
            if end.code:
                raise
            world.finish()  # `sys.exit()` is one way to return
            local = [None]
        # Sent to rank 0, which alone prints and writes. The watchdog reports a rank that never sends.
        world.waiting = Returned()
        everything = world.base.gather(packed(world, local[0]))  # on MPI's own communicator: not in the trace
        world.close()
    except BaseException as error:
        end_job(world, error)
    return world.size, local, [pickle.loads(data) for data in everything or ()]


def whole_lines() -> None:
    """Let standard output and error leave line by line, each in one write, so that ranks' lines do not get mixed.

    Unbuffered (PYTHONUNBUFFERED, python -u), Python writes the words of a `print` and the line's end separately; into a
    pipe it otherwise keeps all lines to the end of the program. MPICH's mpiexec passes whole writes on. Open MPI's
    reads blocks of 4,096 B from each rank, so that it cuts a line where a rank prints many in a row.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's, or a test's
            stream.reconfigure(line_buffering=True, write_through=False)


def packed(world: MPIWorld, result: Any) -> bytes:
    """Return a rank's result and trace in bytes; UsageError when the result cannot be sent."""
    try:
        return pickle.dumps((result, world.trace))
    except Exception as error:
        raise UsageError(
            f"rank {world.rank}: its result, a {type(result).__name__}, cannot be sent to rank 0"
            f" ({reason(error, named=True)}); return arrays, numbers or text, or nothing"
        ) from None


def is_broken_off(world: MPIWorld, error: BaseException) -> bool:
    """Return whether MPI has failed in a call of this package, and not because of the arguments of the call.

    MPICH reads the memory of other ranks' processes, and may notice that one is gone before mpiexec ends the job.
    """
    if not isinstance(error, world.MPI.Exception):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    caller = [file for file in files if not file.endswith(".pyx")][-1]
    causes = (world.MPI.ERR_OTHER, world.MPI.ERR_INTERN, world.MPI.ERR_UNKNOWN)
    return error.Get_error_class() in causes and Path(caller).parent == Path(__file__).parent


def end_job(world: MPIWorld, error: BaseException) -> NoReturn:
    """Print what went wrong on this rank, once for all ranks that say the same, and end all processes."""
    code = EXIT_CODE if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code

    # The text: one sentence for an error that says all, a traceback for any other. What it says is the key.
    place, text, key = f"rank {world.rank} of {world.size}", "", ""
    with suppress(Exception):  # whatever happens while it is made and printed, the job ends
        if isinstance(error, MinidistError):
            text = "\n  ".join(lines_of(error))
            # What stands behind the rank's own number is the same where all ranks say the same, up to addresses.
            said = text.removeprefix(f"rank {world.rank}:").strip()
            text, key = f"rank {world.rank}: {said}", re.sub(r" at 0x\w+", "", said)
            if isinstance(error, MismatchError | BufferReuseError):
                key = type(error).__name__  # each rank that notices it has a sentence, and one is enough
        elif isinstance(error, KeyboardInterrupt):
            text, key = f"{place}: {interruption(world.place)}", "interrupted"
        elif isinstance(error, SystemExit):
            text = f"{place}: SystemExit {error}; the job ends."
        elif is_broken_off(world, error):
            text = (
                f"{place}: MPI cannot go on ({str(error).splitlines()[-1].strip()}), as where the process of another"
                " rank has ended; start the job again, with --resume where it saves checkpoints"
            )
        else:
            note_call(error)
            text = f"{place} raised; the job ends.\n{traceback_of(error)}"
        sys.stdout.flush()  # Abort would lose what was printed before
    world.end(f"minidist: {text or place}", code, key or text.replace(f"rank {world.rank}", "rank"))
