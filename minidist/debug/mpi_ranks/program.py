"""Runs a program of mpi4py on simulated ranks: once, with other choices of its wildcard receives, or with all of them.

A choice is which of several messages a receive from any rank gets. The first run takes the one that is there first.

Proved by: tests/mpi_ranks/test_program.py
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minidist.base.user_file import ProgramError
from minidist.comm.call_site import is_of_user
from minidist.comm.program_lines import line_of_error
from minidist.comm.sim.choosers import Chooser, earliest, explore, seeded
from minidist.core.base.errors import MinidistError, UsageError
from minidist.debug.mpi_ranks.communicator import Aborted
from minidist.debug.mpi_ranks.constants import Unsupported
from minidist.debug.mpi_ranks.module import modules_of
from minidist.debug.mpi_ranks.world import MPIWorld
from minidist.debug.rank_process import RankProcess, UserModules, own_process_state
from minidist.debug.results import unlike_line
from minidist.debug.user_program import UserProgram


class AbortError(MinidistError):
    """The program has called Abort; exit_code is its code."""

    def __init__(self, aborted: Aborted) -> None:
        super().__init__(str(aborted))
        self.exit_code = aborted.code % 256 or 1


@dataclass(frozen=True)
class MPIRun:
    """What a run leaves behind. outputs: what each rank has printed."""

    world: MPIWorld
    outputs: list[str]


def run_on_ranks(
    program: UserProgram,
    ranks: int,
    chooser: Chooser = earliest,
    at_end: Callable[[MPIWorld], None] = lambda world: None,
    **options: Any,
) -> MPIRun:
    """Run a program on every rank, each with its own modules, as processes have. options: of the simulated world.

    at_end: called with the world when the run has ended, in an error, too. Errors are those of SimWorld.run;
    ProgramError for an exception of the program, AbortError for its Abort.
    """
    program.check()
    world = MPIWorld(ranks, chooser=chooser, **options)
    outputs = [""] * ranks

    def of_rank(comm: Any) -> None:
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
        except BaseException as error:
            raise what_happened(world, error) from None
        finally:
            at_end(world)
    if world.matching.refused is not None:
        raise world.matching.refused
    return MPIRun(world, outputs)


def what_happened(world: MPIWorld, error: BaseException) -> BaseException:
    """Return the error to raise for one that ended a run: the cause, without the frames of this package."""
    if world.matching.refused is not None:
        return world.matching.refused
    if isinstance(error, Aborted):
        return AbortError(error)
    if isinstance(error, Unsupported):
        return UsageError(f"{error}, at {line_of_error(error)}")
    if isinstance(error, MinidistError) or not isinstance(error, Exception | SystemExit):
        return error

    # What the program's last line has called of this package says nothing about it.
    last, step = None, error.__traceback__
    while step is not None:
        last = step if is_of_user(step.tb_frame.f_code.co_filename) else last
        step = step.tb_next
    if last is not None:
        last.tb_next = None
    return ProgramError(error, UserProgram.run.__code__.co_filename)


def other_choices(run: Callable[[Chooser], MPIRun], samples: int, every: bool) -> Iterator[MPIRun | MinidistError]:
    """Yield runs with other choices of wildcard receives, or the error that ended one.

    samples: the largest number of runs; their choices are drawn at random, or, with `every`, are all that there are,
    each once.
    """

    def outcome(chooser: Chooser) -> MPIRun | MinidistError:
        try:
            return run(chooser)
        except MinidistError as error:
            return error

    if every:
        yield from islice(explore(outcome, samples + 1), samples)
    else:
        for seed in range(samples):
            yield outcome(seeded(seed))


def difference(first: MPIRun, other: MPIRun | MinidistError) -> str:
    """Return in what a run differs from the first, "" for nothing: how it ended, and what a rank has printed."""
    if isinstance(other, MinidistError):
        return f"the program fails: {other}"
    return unlike_line(first.outputs, other.outputs, first.world.size, "the first run")
