"""`minidist compare`: is the parallel job equal to the same job on one device, tensor by tensor?

Proved by: tests/commands/test_cli.py, tests/equality/test_layout_sweep.py
"""

import time
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

from minidist.comm.launched import launched_rank
from minidist.commands.command import Argument, Option, Result, command_line, json_or_table, say
from minidist.commands.flags import Timeout, within_limits
from minidist.commands.options import (
    DeepSpeed,
    DeviceName,
    EagerBytes,
    Ranks,
    TraceFile,
    given_flags,
    given_settings,
    on_device,
    takes_config,
    with_deepspeed,
)
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig, flag
from minidist.techniques import own_loop, sums_buckets

CALL = "minidist compare FILE.py:RANK FILE.py:ALONE --ranks 4"


Functions = Annotated[
    list[str] | None,
    Argument(
        metavar="[FILE.py:RANK [FILE.py:ALONE]]",
        help="your own program: RANK(comm) is what a rank of --ranks does, ALONE() the same on one device (default:"
        " RANK on one rank); what they return is compared",
    ),
]
Theirs = Annotated[
    Path | None, Option(help="a dump of another framework's gradients, to compare with ours for its weights and batch")
]
Against = Annotated[Path | None, Option(help="with --theirs: another dump, in the place of our run; needs --tolerance")]
Tolerance = Annotated[
    float,
    Option(
        help="your own functions: largest allowed difference, as a share of a tensor's largest entry; with --against as"
        " a share of its norm",
        callback=within_limits,
    ),
]


@takes_config
@json_or_table
def compare(
    config: TrainConfig,
    functions: Functions = None,
    ranks: Ranks = None,
    timeout: Timeout = 60.0,
    trace: TraceFile = None,
    eager_bytes: EagerBytes = 0,
    deepspeed: DeepSpeed = None,
    device: DeviceName = "cpu",
    matrix: Annotated[
        bool, Option("--matrix", help="every valid layout of --ranks (default 8) on a small GPT")
    ] = False,
    sample: Annotated[int | None, Option(help="with --matrix: this many layouts, chosen to differ most")] = None,
    processes: Annotated[int, Option(help="with --matrix: processes that share the layouts")] = 1,
    theirs: Theirs = None,
    against: Against = None,
    tolerance: Tolerance = 0.0,
) -> Result | None:
    """Run the job in parallel and on one device, and compare every tensor of every step.

    With --theirs, compare the gradients of another framework with ours. The exit code is 1 when they differ.
    """
    from minidist.commands.runner import chosen, run_comparison

    if functions:
        return _own_functions(functions, ranks, timeout, trace, eager_bytes, tolerance)
    if theirs is not None:
        return _dumps(config, theirs, against, tolerance)
    if against is not None:
        raise UsageError("--against is the dump that another one is compared with; add --theirs DIR")
    if "tolerance" in given_flags():
        raise UsageError(
            "--tolerance is of functions of your own, FILE.py:RANK FILE.py:ALONE, and of --against; leave it out"
        )
    if matrix:
        of_one_job = ("trace", "timeout", "eager_bytes", "deepspeed", "device")
        _refuse(of_one_job, "is of one job, and --matrix runs many; leave one of the two out")
        return _sweep(config, 8 if ranks is None else ranks, sample, processes)
    _refuse(("sample", "processes"), "is a number of layouts or processes of --matrix; add --matrix, or leave it out")
    config = config if deepspeed is None else with_deepspeed(config, deepspeed)

    # Bits equal one device's only when gradients are summed in a fixed order, so that is the default here, where
    # gradients are summed by an all-reduce.
    if "reduction" not in given_settings() and own_loop(config) is None and not sums_buckets(config):
        config = config.model_copy(update={"reduction": "ordered"})
    config = chosen(config, ranks)
    with on_device(device, config):
        verdict = run_comparison(config, ranks, timeout, eager_bytes, trace, command_line(), given_settings())
    if verdict is None:
        return None
    return Result(verdict.as_dict(), lambda: print(verdict.sentence()), 0 if verdict.equal else 1)


def _refuse(names: Iterable[str], why: str) -> None:
    """Raise UsageError for the first of these flags and settings that is given."""
    given = given_settings()
    for name in names:
        if name in given:
            raise UsageError(f"{flag(name)} {why}")


def _own_functions(
    functions: list[str], ranks: int | None, timeout: float, trace: Path | None, eager_bytes: int, tolerance: float
) -> Result | None:
    """Compare what the user's function of a rank returns on every rank with what one device returns."""
    from minidist.base.trace_file import write_traces
    from minidist.comm.launching import execute, under_mpiexec, writable
    from minidist.job.equality.own_functions import alone_function, compare_returned, rank_function
    from minidist.job.train.progress import Clock

    if len(functions) > 2:
        raise UsageError(f"{len(functions)} functions; give that of a rank, and that of one device: {CALL}")
    of_a_job = sorted({*TrainConfig.model_fields, "matrix", "deepspeed"})
    _refuse(of_a_job, f"is of minidist's own training loop, and your functions have theirs: {CALL}")
    if not 0 <= tolerance < 1:
        raise UsageError(f"--tolerance {tolerance:g}; it must be 0 (bit for bit) or a share below 1")
    if ranks is None and not under_mpiexec():
        raise UsageError(f"how many ranks? {CALL}")

    # Both are found before any rank starts. One device runs last: under mpiexec the other processes have ended then.
    rank, alone = rank_function(functions[0]), alone_function(functions[-1])
    if trace is not None:
        writable(trace)
    with Clock("compare: the ranks") if launched_rank() == 0 else nullcontext():
        outcome = execute(rank, ranks=ranks, timeout=timeout, eager_bytes=eager_bytes)
    if not outcome.is_root:
        return None
    if trace is not None:
        write_traces(trace, outcome.traces, world=outcome.world, command=command_line())
    with Clock("compare: one device"):
        expected = alone()
    verdict = compare_returned(expected, outcome.results, tolerance)
    return Result(verdict.as_dict(), lambda: print(verdict.sentence()), 0 if verdict.equal else 1)


def _dumps(config: TrainConfig, theirs: Path, against: Path | None, tolerance: float) -> Result:
    """Compare a dump with our run of its weights and batch, or with a second dump."""
    from minidist.debug.dumps.dump import read_dump
    from minidist.debug.dumps.dump_comparison import compare_dumps, compare_with_ours
    from minidist.debug.dumps.dump_names import Heads

    # Shapes say all sizes of the model but the number of heads.
    others = sorted(set(TrainConfig.model_fields) - {"model", "heads", "kv_heads"})
    others += ["deepspeed", "device", "matrix", "processes", "ranks", "sample", "trace"]
    _refuse(others, "is of a job, and --theirs compares files; leave it out")
    if config.model not in ("gpt", "llama"):
        raise UsageError(f"--theirs with --model {config.model}; dumps of a gpt or a llama are compared")
    if against is not None and not 0 < tolerance < 1:
        raise UsageError("--against needs --tolerance, a share between 0 and 1: nothing says how much rounding differs")
    if against is None and "tolerance" in given_flags():
        raise UsageError("--tolerance belongs to --against; without --against it is measured, so leave it out")
    dump = read_dump(theirs)
    if against is None:
        verdict = compare_with_ours(dump, config.model, config.heads, config.kv_heads)
    else:
        heads = Heads(config.heads, config.kv_heads or config.heads)
        verdict = compare_dumps(dump, read_dump(against, "--against"), config.model, heads, tolerance)
    return Result(verdict.as_dict(), lambda: print(verdict.text()), 0 if verdict.equal else 1)


def _sweep(config: TrainConfig, ranks: int, sample: int | None, processes: int) -> Result:
    """Compare every valid layout with one device; flags that describe the job, not its layout, change the job."""
    from minidist.job.equality import layout_sweep

    for name, value in (("ranks", ranks), ("sample", sample), ("processes", processes)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1")

    # Flags of axes and schedules contradict a sweep over them; all other settings change the small job.
    _refuse(sorted(layout_sweep.LAYOUT), "is varied by --matrix; leave one of the two out")
    job = {name: getattr(config, name) for name in given_settings() & set(TrainConfig.model_fields)}

    # Combinations that a rule refuses are counted under its sentence, not run.
    began = time.perf_counter()
    layouts, refused = layout_sweep.enumerate_layouts(ranks, **job)
    chosen = layouts if sample is None else layout_sweep.stratified(layouts, sample)
    rows = []
    # Each line is printed as soon as its layout is compared: a sweep takes minutes. With --json they are progress.
    tell = say if "json" in given_flags() else partial(print, flush=True)
    for row in layout_sweep.run_sweep(chosen, ranks, processes, **job):
        rows.append(row)
        tell(layout_sweep.line(row))
    seconds = time.perf_counter() - began
    return Result(
        layout_sweep.as_dict(rows, refused, ranks, seconds),
        lambda: print(layout_sweep.summary(rows, refused, seconds)),
        0 if rows and all(row.equal for row in rows) else 1,
    )
