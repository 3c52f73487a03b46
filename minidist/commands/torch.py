"""`minidist torch`: a program of torch.distributed on simulated ranks in one process.

Proved by: tests/torch_ranks/test_program.py
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from minidist.base.errors import UsageError, quoted
from minidist.base.extras import extra
from minidist.base.limits import check_count, check_ranks
from minidist.base.trace_file import write_traces
from minidist.base.user_file import is_user_function, load_function
from minidist.commands.command import Argument, Option, Result, json_or_table, say
from minidist.commands.flags import Timeout, within_limits

if TYPE_CHECKING:
    from minidist.debug.torch_ranks.program import TorchRun
    from minidist.job.equality.own_functions import ReturnedComparison


class Cuda(StrEnum):
    """What a CUDA device means."""

    cpu = "cpu"
    real = "real"


MAX_RANKS = 1_024  # each is a thread with the stack and the memory of its program


@dataclass(frozen=True)
class ComparisonFlags:
    """The flags of a comparison with one device."""

    compare: Annotated[
        str | None,
        Option(help="FILE.py:FUNCTION of one device: its tensors must be those that every rank's FUNCTION returns"),
    ] = None
    tolerance: Annotated[
        float | None,
        Option(
            help="with --compare: largest allowed difference, as a share of a tensor's largest entry (default: 1e-5)",
            callback=within_limits,
        ),
    ] = None
    rounding: Annotated[
        str | None,
        Option(help="with --compare: fp32, fp16 or bf16; the tolerance is 8 times the error of one rounding"),
    ] = None

    def allowed(self) -> float:
        """Return the tolerance, as a share of a tensor's largest entry; with `rounding` that of a dtype."""
        given, rounding = self.tolerance, self.rounding
        if rounding is None:
            return 1e-5 if given is None else given
        from minidist.job.equality.rounding import MARGIN, UNIT

        if rounding not in UNIT:
            raise UsageError(f"--rounding {quoted(rounding)}; give one of {', '.join(UNIT)}")
        if self.compare is None:
            raise UsageError(f"--rounding {rounding} is of --compare; give --compare FILE.py:FUNCTION, or leave it out")
        if given is not None:
            raise UsageError(
                f"--rounding {rounding} with --tolerance {given:g}; each gives the tolerance: leave one out"
            )
        return MARGIN * UNIT[rounding]

    def verdict(self, run: "TorchRun", seed: int) -> "ReturnedComparison | None":
        """Return how every rank's tensors differ from those of one device; None where nothing is compared."""
        if self.compare is None:
            return None
        from minidist.debug.torch_ranks.isolation import random_numbers_from
        from minidist.debug.torch_ranks.program import as_arrays
        from minidist.job.equality.own_functions import compare_returned, returned_tensors

        with random_numbers_from(seed):
            alone = as_arrays(load_function(self.compare)())
        of_ranks = [returned_tensors(f"rank {rank}", value) for rank, value in enumerate(run.results)]
        return compare_returned(returned_tensors("one device", alone), of_ranks, self.allowed())


@dataclass(frozen=True)
class RunFlags:
    """The flags of how the ranks run."""

    check_buffers: Annotated[bool, Option(help="report code that uses a tensor before the wait for its operation")] = (
        True
    )
    interleavings: Annotated[
        int, Option(help="run N times more, the ranks in other orders, and compare what they print and send")
    ] = 0
    eager_bytes: Annotated[int, Option(help="sends of up to this many bytes are buffered")] = 0
    timeout: Timeout = 60.0
    trace: Annotated[Path | None, Option(help="where the trace goes, for `minidist report`")] = None

    def write(self, world: Any) -> None:
        """Write the trace of a world, where one is asked for."""
        if self.trace is not None:
            say(f"written: {write_traces(self.trace, world.traces, world='simulated')}")


Script = Annotated[
    str,
    Argument(
        help="FILE.py, as under torchrun; or FILE.py:FUNCTION, which is called on every rank; or, with -m, a module"
    ),
]
CudaDevice = Annotated[
    Cuda | None, Option(help="what a CUDA device means: the CPU, which is the default without a GPU; or the real one")
]
OwnPackages = Annotated[
    list[str] | None,
    Option(help="an installed package that every rank imports for itself, because it keeps state in globals"),
]


@json_or_table
def torch(
    *,
    script: Script,
    arguments: Annotated[list[str] | None, Argument(help="the script's own arguments")] = None,
    module: Annotated[bool, Option("-m", help="SCRIPT is the name of a module, as under python -m")] = False,
    ranks: Annotated[int, Option(help="simulated ranks")] = 4,
    cuda: CudaDevice = None,
    own: OwnPackages = None,
    seed: Annotated[int, Option(help="seed of every rank's random numbers", min=0)] = 0,
    comparison: ComparisonFlags,
    run: RunFlags,
) -> Result:
    """Run a program of torch.distributed, unchanged, on simulated ranks of this process, on the CPU.

    A hang is reported at once, with every rank's operation and line; mismatched collectives are named; all bytes are
    counted. The flags stand before the script.
    """
    check_ranks(ranks, most=MAX_RANKS)
    check_count(run.interleavings, "--interleavings", most=10_000)
    compares = comparison.compare is not None
    if compares and not is_user_function(script):
        raise UsageError(f"--compare with {script}; give FILE.py:FUNCTION, which returns the tensors to compare")
    comparison.allowed()
    installed = extra("torch", "minidist torch")

    from minidist.debug.torch_ranks import program

    # The run, and the same in other orders.
    main = program.load_program(script, arguments or (), module)
    if compares:
        returned: Any = main
        main = lambda: program.as_arrays(returned())  # noqa: E731
    settings = program.Settings(seed, own or (), cuda or ("real" if installed.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {
        "settings": settings,
        "timeout": run.timeout,
        "eager_bytes": run.eager_bytes,
        "checks": run.check_buffers or "headers",
    }
    if warning := program.version_warning():
        say(warning)
    say(f"every rank's random numbers begin with --seed {seed}")

    with program.groups_begin_when_asked(compares):
        first, races = program.run_in_orders(main, ranks, run.interleavings, run.write, **options)

    verdict = comparison.verdict(first, seed)
    silent = _say_what_is_missing(first, compares)
    code = 1 if races or (verdict is not None and not verdict.equal) else 3 if silent else 0
    return _result(first, races, run.interleavings, verdict, code)


def _say_what_is_missing(first: "TorchRun", compares: bool) -> bool:
    """Say what is not what the program asked for; return whether no rank has communicated, and should have."""
    if first.first_cuda is not None:
        say(f"CUDA is named at {first.first_cuda}; all tensors are on the CPU (--cuda cpu)")
    silent = not compares and first.world.size > 1 and not first.has_communicated
    if silent:
        say(
            "no rank has communicated; a program starts its ranks with mp.spawn or Process, or calls init_process_group"
        )
    return silent


def _result(
    first: "TorchRun", races: str, interleavings: int, verdict: "ReturnedComparison | None", code: int
) -> Result:
    """Return what the command prints: the bytes of the first run, whether other orders differ, and the comparison."""
    from minidist.debug.results import bytes_by_operation, print_sent

    rows = bytes_by_operation(first.traces, first.groups, "group")
    value = {
        "ranks": first.world.size,
        "virtual_seconds": first.virtual_seconds,
        "sent": rows,
        "interleavings": interleavings,
        "race": races,
        "compared": verdict.as_dict() if verdict is not None else None,
    }

    def show() -> None:
        print_sent(first.world.size, first.virtual_seconds, rows, "group")
        if races:
            print(races)
        elif interleavings:
            print(f"{interleavings} other orders of the ranks print and send the same")
        if verdict is not None:
            print(verdict.sentence())

    return Result(value, show, code)
