"""Run one job from the command line, simulated or under mpiexec, and report its cost or whether it equals one device.

Proved by: tests/commands/test_cli.py, tests/planning/test_volumes.py
"""

import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.base.errors import UsageError, counted, quoted_path
from minidist.base.trace_file import write_traces
from minidist.base.traces import sent_by_purpose
from minidist.comm.launched import launched_rank
from minidist.comm.launching import Outcome, execute, under_mpiexec, writable
from minidist.core.comm import Comm
from minidist.core.parallel.dims import ParallelDims
from minidist.data import data_digest, load_dataset
from minidist.job import checkpoint
from minidist.job.config.rules import notices
from minidist.job.config.train_config import Batches, TrainConfig, flag, resolve_batches, resolve_dims
from minidist.job.train.progress import Progress
from minidist.job.train.start import number_of_ranks
from minidist.job.train.state import Observer, TrainResult
from minidist.job.train.trainer import train
from minidist.planning.volumes import phases_bytes
from minidist.techniques import changes_batches, history, of_job, own_loop, ranks_beside, trains_alone

if TYPE_CHECKING:
    from minidist.job.equality.compare import Comparison


@dataclass
class Summary:
    """The report of `minidist train`."""

    world: str
    losses: list[float]
    ranks: int
    bytes_by_purpose: dict[str, dict[str, int | None]]
    peak_bytes: list[int]
    trace: str | None
    seconds: float
    digest: str
    held_out: dict[int, float] | None = None  # steps done -> loss on held-out data, with --evaluate-every
    measured: dict[str, Any] = field(default_factory=dict)  # what techniques report
    lines: Sequence[str] = ()  # and how people read it
    messages_by_purpose: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints; `digest` is a fingerprint of weights and optimizer state."""
        names = ("losses", "ranks", "bytes_by_purpose", "messages_by_purpose", "peak_bytes", "trace", "digest")
        # Measurements that were not asked for have no key.
        held_out = {"held_out": self.held_out} if self.held_out else {}
        return {name: getattr(self, name) for name in names} | held_out | self.measured

    def volumes_hold(self) -> bool:
        """Return whether every purpose's measured volume equals its closed form."""
        return all(volume["closed_form"] in (None, volume["measured"]) for volume in self.bytes_by_purpose.values())

    def volume_lines(self) -> list[str]:
        """Format the bytes by purpose next to the closed form."""
        if not self.bytes_by_purpose:
            return ["nothing was sent: there is one rank"]
        numbers = [f"{number:,}" for volume in self.bytes_by_purpose.values() for number in volume.values()]
        width = max(16, 2 + max(map(len, numbers)))
        lines = [f"{'bytes sent, all ranks':24}{'measured':>{width}}{'closed form':>{width}}"]
        for name, volume in self.bytes_by_purpose.items():
            closed = volume["closed_form"]
            mark = "" if closed in (None, volume["measured"]) else "   DIFFERENT"
            shown = "none" if closed is None else f"{closed:,}"
            lines.append(f"  {name:22}{volume['measured']:{width},}{shown:>{width}}{mark}")
        return lines

    def table(self) -> str:
        """Format the bytes by purpose next to the closed form, the peaks, and the optional measurements."""
        lines = [
            f"{counted(self.ranks, 'rank')} ({self.world}), {counted(len(self.losses), 'step')} in {self.seconds:.2f}"
            f" s, loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}"
        ]
        lines += self.volume_lines()
        lines.append(f"peak bytes of a rank: {max(self.peak_bytes):,}")

        # What was asked for by other flags.
        lines += self.lines
        if self.held_out:
            losses = (f"{loss:.4f} after {step} steps" for step, loss in self.held_out.items())
            lines.append(f"loss on held-out data: {', '.join(losses)}")
        return "\n".join(lines)


def chosen(config: TrainConfig, ranks: int | None, has_values: bool = True) -> TrainConfig:
    """Return the job with what its techniques choose before it begins; the first process prints what that is."""
    for extension in of_job(config):
        config, lines = extension.before_ranks(config, ranks, has_values)
        for line in lines if launched_rank() == 0 else ():
            print(line, file=sys.stderr, flush=True)
    return config


def say_notices(config: TrainConfig, size: int, without: Collection[str] = ()) -> None:
    """Print which settings have no effect on one rank, or in a short job; under mpiexec one process does."""
    if launched_rank() == 0:
        for line in notices(config, resolve_batches(config, size), without):
            print(f"minidist: {line}", file=sys.stderr, flush=True)


def run_training(
    config: TrainConfig,
    ranks: int | None,
    timeout: float,
    trace: Path | None,
    eager_bytes: int = 0,
    command: str = "",
    metrics: Path | None = None,
    callbacks: Sequence[Observer] = (),
) -> Summary | None:
    """Train and return the summary, or None on ranks that do not print.

    trace: where the trace goes; None: no events are kept, so that the memory of a long run does not grow. callbacks:
    called by every rank after every step.
    """
    size = number_of_ranks(config, ranks)
    say_notices(config, size)
    if trace is not None:
        writable(trace)
    if metrics is not None:
        _check_metrics(metrics, trace, config)
    progress = Progress(config.steps, interactive=not under_mpiexec() and sys.stderr.isatty())
    loop = own_loop(config)
    shown_by = 0 if loop is None else loop.shown_by

    # Rank 0 writes metrics; who shows progress, a technique with a separate loop says.
    def main(comm: Comm) -> TrainResult:
        shows = [progress] if comm.rank == shown_by else []
        return train(comm, config, [*callbacks, *shows, *(writing if comm.rank == 0 else ())], trace is not None)

    started = time.perf_counter()
    # Closed also when training fails: the bar, and the file of metrics.
    with ExitStack() as stack:
        stack.enter_context(progress)
        writing: list[Observer] = []
        if metrics is not None:
            from minidist.job.train.metrics import MetricsFile

            writing.append(stack.enter_context(MetricsFile(metrics, config.resume)))
        outcome = execute(
            main,
            ranks=size,
            timeout=timeout,
            eager_bytes=eager_bytes,
            equal=partial(settings_to_agree_on, "train", config),
            record="totals" if trace is None else True,
        )
    if not outcome.is_root:
        return None
    return summarize(config, outcome, trace, time.perf_counter() - started, command)


def _check_metrics(path: Path, trace: Path | None, config: TrainConfig) -> None:
    """Raise UsageError when the file of --metrics is a user's own, or the trace, or of another run than is resumed."""
    if trace is not None and path.resolve() == trace.resolve():
        raise UsageError(f"--metrics and --trace are the same file, {quoted_path(path)}; give one of them another name")
    from minidist.job.train.metrics import METRICS_BEGIN, check_same_run

    writable(path, "--metrics", METRICS_BEGIN)
    if config.resume and config.save is not None:
        from minidist.job.checkpoint import Checkpoint
        from minidist.job.checkpoint.resume import read_job_state

        check_same_run(path, read_job_state(Checkpoint(config.save, step=history(config).from_step)).losses)


def settings_to_agree_on(command: str, config: TrainConfig) -> dict[str, Any]:
    """Return what every process of mpiexec must have equal: the command, its settings, and the content of its data."""
    settings = {flag(name): value for name, value in config.model_dump().items()}
    # The same data may have another path on another host.
    del settings["--data"]
    return {"the command": command, **settings, "the content of --data": data_digest(load_dataset(config.data))}


def summarize(config: TrainConfig, outcome: Outcome, path: Path | None, seconds: float, command: str = "") -> Summary:
    """Write the trace, unless `path` is None, and return what was sent, with its closed form."""
    results: list[TrainResult] = outcome.results
    batches = resolve_batches(config, outcome.size)
    first, (measured, messages) = results[0], sent_by_purpose(outcome.traces)
    closed = _closed_form(config, batches, results) | _checkpoint_bytes(config, outcome.size, first)
    # How often algorithms are measured for --reduction auto depends on time, so those bytes have no closed form.
    table = {
        name: {"measured": measured.get(name, 0), "closed_form": None if name == "tuning" else closed.get(name, 0)}
        for name in dict.fromkeys((*closed, *measured))
    }

    # What techniques report: of rank 0, or of all ranks together. With a separate loop no rank has a `result`.
    entries, extensions = dict(first.measured), [] if own_loop(config) else list(of_job(config))
    for extension in extensions:
        entries |= extension.of_all_ranks([result.measured for result in results])

    if path is not None:
        mesh = {} if ranks_beside(config) else mesh_of(batches.dims)
        write_traces(
            path,
            outcome.traces,
            world=outcome.world,
            command=command,
            closed_form=closed,
            losses=first.losses,
            mesh=mesh,
            gradient_exponents=_gradient_exponents(results),
            **{name: value for extension in extensions for name, value in extension.header(entries).items()},
        )
    return Summary(
        outcome.world,
        first.losses,
        outcome.size,
        table,
        [result.peak_bytes for result in results],
        None if path is None else str(path),
        seconds,
        first.digest,
        first.held_out or None,
        entries,
        [line for extension in extensions for line in extension.lines(entries)],
        messages,
    )


def _closed_form(config: TrainConfig, batches: Batches, results: list[TrainResult]) -> dict[str, int]:
    """Return what the ranks must have sent without checkpoints, by purpose, from the sizes that each rank reports."""
    first = results[0]
    loop = own_loop(config)
    if loop is not None:
        return loop.bytes_sent(batches, first)
    # Ranks outside of the layout have no phase.
    phases = [result.phases for result in results if result.phases]
    return dict(phases_bytes(config, batches, phases, first.first_step, first.runs))


def _checkpoint_bytes(config: TrainConfig, size: int, first: TrainResult) -> dict[str, int]:
    """Return the bytes of saving checkpoints, of a job that saves and has several ranks."""
    loop = own_loop(config)
    saving = size - ranks_beside(config) if loop is None else size
    if config.save is None or saving <= 1:
        return {}
    every = config.every or config.steps
    saves = config.steps // every - first.first_step // every + (config.steps % every > 0)
    averaged = 0 if loop is None else loop.bytes_averaged(first)
    return {"checkpoint": saves * (checkpoint.save_bytes(saving) + 2 * (saving - 1) * averaged)}


def _gradient_exponents(results: list[TrainResult]) -> dict[str, int]:
    """Return, for the picture of exponents, the sizes of the last step's gradient entries on all ranks."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.gradient_exponents)
    return dict(counts)


def run_comparison(
    config: TrainConfig,
    ranks: int | None,
    timeout: float,
    eager_bytes: int = 0,
    trace: Path | None = None,
    command: str = "",
    given: Collection[str] | None = None,
) -> "Comparison | None":
    """Train in parallel and on one device; return the verdict, or None on ranks that do not print.

    given: the settings that the user chose; others may be set to what the float tier needs. None: all are chosen.
    """
    from minidist.job.equality.compare import compare_rank
    from minidist.job.equality.expected import expected_snapshots

    size = number_of_ranks(config, ranks)
    if trace is not None:
        writable(trace)
    if config.save is not None:
        raise UsageError("compare trains from the first step, in parallel and on one device; leave out --save")
    # The order of additions decides what is compared on one rank, too: the tier.
    say_notices(config, size, ["reduction"])
    loop, interactive = own_loop(config), not under_mpiexec() and sys.stderr.isatty()
    if loop is None:
        config = _with_a_tier(config, size, ranks, TrainConfig.model_fields if given is None else given)

    # Simulated ranks share one reference; under mpiexec, and where ranks differ on purpose, each computes its own.
    # Ranks that choose their batches while they train tell them afterwards. An `OwnLoop` is compared after the run: its
    # ranks have no common steps.
    own = loop is None and (under_mpiexec() or trains_alone(config) or changes_batches(config))
    alone, expected = Progress(config.steps, interactive and not own, "compare: one device", ends=False), None
    if loop is None and not own:
        with alone:
            expected = expected_snapshots(config, size, observers=[alone])

    # Only rank 0 shows progress.
    def main(comm: Comm) -> Any:
        if loop is not None:
            return loop.train_and_keep(comm, together)
        watching = () if comm.rank else ([together], [alone])
        return compare_rank(comm, config, expected, *watching)

    with Progress(config.steps, interactive, f"compare: {size} ranks", ends=False) as together:
        equal = partial(settings_to_agree_on, "compare", config)
        outcome = execute(main, ranks=size, timeout=timeout, eager_bytes=eager_bytes, equal=equal)
    if not outcome.is_root:
        return None
    verdict: Comparison | None = None if loop is not None else outcome.results[0]
    _write_comparison(trace, outcome, config, command, verdict)
    if loop is None:
        return verdict
    with alone:
        return loop.compare(outcome.results, outcome.traces, alone)  # type: ignore[no-any-return]


def _write_comparison(
    trace: Path | None, outcome: Outcome, config: TrainConfig, command: str, verdict: "Comparison | None"
) -> None:
    """Write the trace, with the losses and differences of a verdict: for the picture that lays one over the other."""
    if trace is None:
        return
    header: dict[str, Any] = {"command": command}
    if verdict is not None:
        mesh = {} if ranks_beside(config) else mesh_of(resolve_dims(config, outcome.size))
        losses = {"losses": verdict.losses, "reference_losses": verdict.reference_losses}
        header = {"max_difference": verdict.weight_differences, **losses, **header, "mesh": mesh}
    write_traces(trace, outcome.traces, world=outcome.world, **header)


def _with_a_tier(config: TrainConfig, size: int, ranks: int | None, given: Collection[str]) -> TrainConfig:
    """Return the settings with which a tier applies; UsageError when none does."""
    from minidist.job.equality.compare import float_tier_settings, tier_of

    # Where bits cannot be equal, the float tier needs float64 and few steps, unless the user says otherwise.
    dims = resolve_dims(config, size)
    chosen, why = float_tier_settings(config, dims, given)
    config = config.model_copy(update=chosen)
    tier_of(config, dims)
    if chosen:
        number_of_ranks(config, ranks)  # the rules hold for other steps, too: a warm-up may be longer now
        flags = " ".join(f"{flag(name)} {value}" for name, value in chosen.items())
        if launched_rank() == 0:
            print(f"minidist: compared with {flags}: {why}", file=sys.stderr, flush=True)
    return config


def mesh_of(dims: ParallelDims) -> dict[str, int]:
    """Return the axes of a mesh with their ranks, slowest first, for the trace's header."""
    return {"pp": dims.pp, "dp": dims.dp, "cp": dims.cp, "tp": dims.tp}
