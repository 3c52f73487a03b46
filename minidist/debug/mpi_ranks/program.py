"""Runs a program of mpi4py on simulated ranks: once, with other choices of its wildcard receives, or with all of them.

Proved by: tests/mpi_ranks/test_program.py
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from minidist.base.errors import MinidistError, UsageError, quoted
from minidist.base.user_file import ProgramError
from minidist.comm import Comm
from minidist.comm.call_site import line_of_error
from minidist.comm.sim.choosers import Chooser, earliest, explore
from minidist.debug.mpi_ranks.communicator import Aborted
from minidist.debug.mpi_ranks.constants import Exception as MPIException
from minidist.debug.mpi_ranks.module import modules_of
from minidist.debug.mpi_ranks.world import MPIWorld
from minidist.debug.rank_process import RankProcess, UserModules, own_process_state
from minidist.debug.user_program import UserProgram


class AbortError(MinidistError):
    """The program has called Abort; exit_code is its code."""

    def __init__(self, aborted: Aborted) -> None:
        super().__init__(str(aborted))
        self.exit_code = aborted.code % 256 or 1


@dataclass(frozen=True)
class MPIRun:
    """What a run leaves behind. outputs: what each rank has printed. names: the program's names of communicators."""

    world: MPIWorld
    outputs: list[str]
    names: dict[str, str]


def run_on_ranks(program: UserProgram, ranks: int, chooser: Chooser = earliest, **options: Any) -> MPIRun:
    """Run a program on every rank, each with its own modules, as processes have. options: of the simulated world.

    Errors are those of SimWorld.run; ProgramError for an exception of the program, AbortError for its Abort.
    """
    program.check()
    world = MPIWorld(ranks, chooser=chooser, **options)
    outputs = [""] * ranks

    def of_rank(comm: Comm) -> None:
        process = RankProcess(beginning, {})
        process.modules.update(modules_of(world, comm))
        world.processes[comm.rank] = process
        world.enter(comm.rank)
        try:
            program.run()
        finally:
            process.output.flush()
            outputs[comm.rank] = process.output.written.getvalue()
            world.leave(comm.rank)

    with own_process_state(UserModules(["mpi4py"])) as beginning:
        try:
            world.run(of_rank)
        except Aborted as aborted:
            raise AbortError(aborted) from None
        except MinidistError:
            raise
        except NotImplementedError as error:
            if "is not simulated by minidist mpi" not in str(error):
                raise ProgramError(error, _RUNS_PROGRAM) from None
            raise UsageError(f"{error}, at {line_of_error(error)}") from None
        except (Exception, SystemExit) as error:
            if isinstance(error, MPIException):
                error.add_note("(an error of MPI, which the program may catch as MPI.Exception)")
            raise ProgramError(error, _RUNS_PROGRAM) from None
    return MPIRun(world, outputs, {})


_RUNS_PROGRAM = UserProgram.run.__code__.co_filename


def other_orders(
    program: UserProgram, ranks: int, chooser: Any, limit: int, **options: Any
) -> Iterator[tuple[int, str]]:
    """Yield the number of each further order, and in what it differs from the first, "" for nothing."""
    raise NotImplementedError


def first_difference(first: MPIRun, other: MPIRun) -> str:
    """Return in what two runs of one program differ, "" for nothing: what a rank has printed, and its messages."""
    for rank, (before, now) in enumerate(zip(first.outputs, other.outputs, strict=True)):
        for line, pair in enumerate(zip_longest(before.splitlines(), now.splitlines(), fillvalue=""), 1):
            if pair[0] != pair[1]:
                return f"rank {rank} prints {quoted(pair[1])} in line {line}, and {quoted(pair[0])} in the first order"
    return ""


with suppress(ImportError):
    pass
