"""`minidist mpi`: a program of mpi4py on simulated ranks in one process, without an MPI library.

Proved by: tests/mpi_ranks/test_program.py
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from minidist.base.limits import check_count, check_ranks
from minidist.base.trace_file import write_traces
from minidist.commands.command import Argument, Option, Result, json_or_table, say
from minidist.commands.flags import Timeout
from minidist.core.base.errors import UsageError

MAX_RANKS = 1_024  # each holds the modules of its program
MAX_CHOICES = 10_000
SAME = {
    "other": "{} other choices of the receives from any rank print the same",
    "one": "no receive from any rank has a choice between messages",
    "choices": "all {} choices of the receives from any rank print the same",
    "first": "the first {} choices of the receives from any rank print the same",
}


EagerLimit = Annotated[
    int, Option(help="MPI's eager limit: sends of up to this many bytes do not wait for their receive")
]
Interleavings = Annotated[int, Option(help="run N times more, with other choices of receives from any rank")]
EveryOrder = Annotated[bool, Option("--every-order", help="run once with every choice of the receives from any rank")]


@json_or_table
def mpi(
    script: Annotated[str, Argument(help="FILE.py, as under mpiexec; with -m the name of a module")],
    arguments: Annotated[list[str] | None, Argument(help="the script's own arguments")] = None,
    ranks: Annotated[int, Option("--ranks", "-n", help="simulated ranks")] = 4,
    module: Annotated[bool, Option("-m", help="run a module, as python -m does")] = False,
    eager_bytes: EagerLimit = 0,
    interleavings: Interleavings = 0,
    every_order: EveryOrder = False,
    timeout: Timeout = 60.0,
    trace: Annotated[Path | None, Option(help="where the trace goes, for `minidist report`")] = None,
) -> Result:
    """Run a program of mpi4py, unchanged, on simulated ranks of this process, without an MPI library.

    A deadlock is reported at once, with every rank's operation and line; dtypes, roots, operations and calls that
    differ are named; all bytes are counted. The flags stand before the script.
    """
    check_ranks(ranks, most=MAX_RANKS)
    check_count(interleavings, "--interleavings", most=MAX_CHOICES)
    check_count(eager_bytes, "--eager-bytes")
    if every_order and interleavings:
        raise UsageError(
            "--every-order with --interleavings; --every-order runs every choice already: give one of them"
        )

    from minidist.debug.mpi_ranks.program import difference, other_choices, run_on_ranks
    from minidist.debug.results import bytes_by_operation
    from minidist.debug.user_program import UserProgram

    if "--ranks" in (arguments or ()):
        say("--ranks stands after the script, so it is passed to the script; minidist's flags stand before it")

    # The run, and the same with other choices.
    program = UserProgram(script, arguments or (), module)
    run = partial(run_on_ranks, program, ranks, timeout=timeout, eager_bytes=eager_bytes)

    def write(world: Any) -> None:  # of a deadlock, too
        if trace is not None:
            say(f"written: {write_traces(trace, world.traces, world='simulated')}")

    first = run(at_end=write)
    races, tried = "", 0
    for other in other_choices(run, MAX_CHOICES if every_order else interleavings, every_order):
        if found := difference(first, other):
            races = f"choice {tried} of the receives from any rank: {found}; the program depends on who comes first"
            break
        tried += 1
    world = first.world
    names = {comm: name for comm, name in world.names.items() if name}  # that the program has given
    value = {
        "ranks": ranks,
        "virtual_seconds": world.end_time,
        "sent": bytes_by_operation(world.traces, names, "communicator"),
        "choices": tried,
        "race": races,
        "never_received": world.lost,
        "never_waited_for": world.unwaited,
    }
    say_alone(program, value)
    same = same_text(tried, bool(interleavings))
    return Result(value, partial(show, value, races or same), 1 if races or world.lost else 0)


def say_alone(program: Any, value: dict[str, Any]) -> None:
    """Say that a program without MPI has done the same on every rank. program: a `UserProgram`."""
    if not value["sent"] and not program.names("mpi4py"):
        say(
            f"{program.source} does not name mpi4py: each of {value['ranks']} ranks has run it alone, and none has sent"
            " anything"
        )


def same_text(tried: int, drawn: bool) -> str:
    """Return that all choices which were tried print the same; "" for none. drawn: they were drawn at random."""
    if not tried:
        return ""
    which = "other" if drawn else "one" if tried == 1 else "choices" if tried < MAX_CHOICES else "first"
    return SAME[which].format(tried)


def show(value: dict[str, Any], choices: str) -> None:
    """Print what a run has sent, what it has left open, and the sentence about other choices."""
    from minidist.debug.results import print_sent

    print_sent(value["ranks"], value["virtual_seconds"], value["sent"], "communicator")
    for sentence in (*value["never_received"], *value["never_waited_for"]):
        print(f"  {sentence}")
    if choices:
        print(choices)
