"""`minidist train --dry-run`: the whole training program on arrays without data.

Every rank builds its part of the model, runs the steps and sends its messages, on meta arrays (base/meta.py). No values
are computed. Bytes, messages, peaks of memory and virtual time are those of the real run, but for messages before the
first step (purpose startup), which take no time here: a dry run measures steps.

With --fold one rank of each pipeline stage runs and stands for its data-, context- and tensor-parallel peers
(comm/sim/folded.py), so that a job on thousands of ranks costs what its stages cost.

Proved by: tests/train/test_dry_run.py, tests/train/test_folded_dry_run.py
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, counted, quoted
from minidist.base.meta import creating_meta
from minidist.base.process import infrequent_gc
from minidist.comm import SimWorld
from minidist.comm.launching import execute, under_mpiexec, writable
from minidist.comm.sim.folded import FoldedWorld
from minidist.comm.sim.links import LinkModel
from minidist.commands.command import Result
from minidist.commands.runner import Summary, say_notices, summarize
from minidist.core.comm import Comm
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.progress import Clock
from minidist.job.train.start import number_of_ranks, settings_that_need_values
from minidist.job.train.state import TrainResult
from minidist.job.train.trainer import train
from minidist.planning.cluster.fit import Fit
from minidist.planning.cluster.gpus import Machine, machine_of
from minidist.planning.job_config import architecture
from minidist.techniques import drains, of_job

# What a step frees before it ends, by purpose.
FREED = ("activation", "activation_gradient", "communication", "unsharded", "input")


@dataclass
class DryRun:
    """The result of a dry run.

    results: of the ranks. seconds: the virtual time of all steps. computing: the seconds in which a rank computes, as
    the mean over all ranks. links: the clock. uneven: the calls that end at different times on folded ranks. machine:
    with --gpu.
    """

    summary: Summary
    config: TrainConfig
    results: Sequence[TrainResult]
    seconds: float
    computing: float
    links: LinkModel
    folded: bool
    uneven: Collection[str]
    machine: Machine | None = None

    @property
    def bubble(self) -> float | None:
        """Return the share of the time in which a rank does not compute."""
        return 1 - self.computing / self.seconds if self.seconds else None

    @property
    def mfu(self) -> float | None:
        """Return model FLOPs per second as a share of the ranks' peak; None for models other than gpt and llama."""
        config, ranks = self.config, self.summary.ranks
        if config.model not in ("gpt", "llama") or not self.seconds:
            return None
        flops = architecture(config).step_flops(resolve_batches(config, ranks).global_batch, config.context)
        return flops * config.steps / (self.seconds * ranks * self.links.flops)

    @property
    def checkpoint_bytes(self) -> list[int]:
        """Return the bytes of each rank's tensors in a checkpoint."""
        return [result.checkpoint_bytes.get(rank, 0) for rank, result in enumerate(self.results)]

    @property
    def later_peak(self) -> tuple[int, int, int]:
        """Return the least, the likely and the most bytes of the fullest rank in a step that is not the first.

        Of more steps than one it is what was measured. After one step, what is still held is there from the beginning
        of the next one; the activations come on top, and at most everything else that a step frees.
        """
        peak = likely = most = self.peak[1]
        for result in self.results if self.config.steps == 1 else ():
            stay = sum(nbytes for purpose, nbytes in result.held.items() if purpose not in FREED)
            freed = {purpose: result.highest.get(purpose, 0) for purpose in FREED}
            likely = max(likely, stay + freed["activation"])
            most = max(most, stay + sum(freed.values()))
        return peak, likely, most

    @property
    def peak(self) -> tuple[int, int]:
        """Return the fullest rank of the steps, and its bytes at its peak."""
        totals = [sum(result.step_peak.values()) for result in self.results]
        return totals.index(max(totals)), max(totals)

    @property
    def fit(self) -> Fit | None:
        """Return whether every rank fits on the GPU; None without --gpu. The low end of the range is what was held."""
        if self.machine is None:
            return None
        low, central, high = (Fit.of_peak(self.machine, peak) for peak in self.later_peak)
        return replace(central, low=low.central, high=high.high)

    def as_dict(self) -> dict[str, Any]:
        """Return what --json prints: the keys of `train` but losses and digest, and those that only a dry run has."""
        result, fit = self.summary.as_dict(), self.fit
        del result["losses"], result["digest"]
        result |= {
            "dry_run": True,
            "folded": self.folded,
            "peak_by_purpose": [one.peak_by_purpose for one in self.results],
            "step_peak_by_purpose": [one.step_peak for one in self.results],
            "virtual_seconds": self.seconds,
            "step_seconds": self.seconds / self.config.steps,
            "bubble": self.bubble,
            "mfu": self.mfu,
        }
        if fit is not None:
            # The keys that `minidist plan` has for a layout.
            result |= {"fits": fit.fits, "fits_with_range": fit.verdict == "yes", "margin_bytes": int(fit.margin)}
        if any(self.checkpoint_bytes):
            result["checkpoint_bytes"] = self.checkpoint_bytes
        return {**result, "upper_bound_because_of": sorted(self.uneven)}

    def table(self) -> str:
        """Format the time, the bytes by purpose, and the memory of the fullest rank."""
        ranks, config = self.summary.ranks, self.config
        batch = f"{resolve_batches(config, ranks).global_batch:,} samples"
        if not config.is_classifier:
            batch += f" of {config.context:,} tokens"
        lines = [
            f"dry run of {counted(ranks, 'rank')}, {counted(config.steps, 'step')} of {batch}:"
            f" {self.seconds / config.steps:.4g} virtual seconds per step"
            + (f", {self.bubble:.1%} of them without computing" if self.bubble is not None else "")
            + (f", MFU {self.mfu:.1%} at peak speeds (`minidist plan` has realistic ones)" if self.mfu else "")
        ]
        if self.mfu is not None and self.mfu > 1:
            lines.append("MFU counts attention between all pairs of positions; only the causal half is computed")
        if self.uneven:
            lines.append(f"the time is an upper bound: folded ranks end {', '.join(sorted(self.uneven))} one by one")
        lines += self.summary.volume_lines()

        # The steps decide what fits. A rank that builds the whole model before it keeps its part may have more before.
        fullest, peak = self.peak
        lines.append(f"peak of rank {fullest}, the fullest, in bytes: {peak:,}")
        for purpose, nbytes in sorted(self.results[fullest].step_peak.items(), key=lambda pair: -pair[1]):
            if nbytes:
                lines.append(f"  {purpose:22}{nbytes:20,}")
        if self.later_peak[1] > peak:
            between = " to ".join(f"{nbytes:,}" for nbytes in dict.fromkeys(self.later_peak[1:]))
            lines.append(f"in later steps, which begin with the optimizer's states: {between} (exact with --steps 2)")
        if self.fit is not None:
            verdict = {"yes": "fits", "may not": "may not fit", "no": "does not fit"}[self.fit.verdict]
            lines.append(f"{verdict}: {self.fit.needs('the fullest rank')}: {self.fit.room}")
        if any(self.checkpoint_bytes):
            most, total = max(self.checkpoint_bytes), sum(self.checkpoint_bytes)
            lines.append(
                f"tensors of a checkpoint: {total:,} B on {counted(ranks, 'rank')}; rank"
                f" {self.checkpoint_bytes.index(most)} writes the most, {most:,} B"
            )
        if self.summary.peak_bytes[fullest] > peak:
            lines.append(f"before the first step, with the whole model: {self.summary.peak_bytes[fullest]:,}")
        return "\n".join(lines)


def check_dry_run(config: TrainConfig, metrics: Path | None) -> None:
    """Raise UsageError for settings that need values, which a dry run does not have."""
    if under_mpiexec():
        raise UsageError("--dry-run simulates its ranks in one process; run it without mpiexec")
    needs = settings_that_need_values(config) | ({} if metrics is None else {"--metrics": metrics})
    for flag, value in needs.items():
        given = flag if value is True else f"{flag} {quoted(str(value))}"
        raise UsageError(f"{given} needs values, and a dry run has none; leave it out")


def check_fold(config: TrainConfig, size: int) -> None:
    """Raise UsageError for jobs in which the ranks of a stage differ."""
    batches = resolve_batches(config, size)
    sequences = 2 * batches.dims.cp if batches.dims.cp > 1 else 1
    differ = {
        f"the replicas of --schedule {config.schedule}": not drains(config),
        "replicas with different numbers of rows": config.weights or not batches.shares.is_even,
        "ranks that orthogonalise other matrices (muon)": config.optimizer == "muon",
        f"the shards of layers (--optimizer {config.optimizer} with --zero {config.zero})": config.zero
        and config.optimizer in ("lars", "lamb"),
        **{extension.unlike: True for extension in of_job(config) if extension.unlike},
        f"parts of --context {config.context} tokens": config.context % sequences,
    }
    for what, present in differ.items():
        if present:
            raise UsageError(f"--fold lets one rank stand for others, and {what} differ; leave out --fold")


def dry_run(
    config: TrainConfig,
    ranks: int | None,
    timeout: float,
    trace: Path | None,
    eager_bytes: int,
    command: str,
    gpu: str | None,
    fold: bool = False,
) -> Result:
    """Run the job on meta arrays and return its cost.

    gpu: the name of the GPU whose speeds and links the clock has. fold: run one rank of each pipeline stage.
    """
    with creating_meta():  # because the rules may build the model
        size = number_of_ranks(config, ranks, has_values=False)
    if fold:
        check_fold(config, size)
    say_notices(config, size)
    if trace is not None:
        writable(trace)
    machine = None if gpu is None else machine_of(gpu)
    links = LinkModel(free_startup=True) if machine is None else links_of(machine, config.precision)

    # The ranks of a stage are neighbours.
    simulated: Callable[..., SimWorld] = SimWorld
    if fold:
        stage = size // config.pp
        simulated = partial(FoldedWorld, classes=[range(first, first + stage) for first in range(0, size, stage)])

    def main(comm: Comm) -> TrainResult:
        with creating_meta():
            result = train(comm, config, timeline=trace is not None)
        # Without values, losses and the digest have no meaning.
        return replace(result, losses=[], digest="", held_out={})

    with infrequent_gc(), Clock(f"dry run of {counted(size, 'rank')}"):
        outcome = execute(
            main,
            ranks=size,
            timeout=timeout,
            eager_bytes=eager_bytes,
            record="totals" if trace is None else True,
            simulated=simulated,
            links=links,
            checks=False,
        )
    computing = sum(one.busy * one.ranks for one in outcome.traces) / outcome.size
    seconds, summary = outcome.end_time or 0.0, summarize(config, outcome, trace, 0.0, command)
    run = DryRun(summary, config, outcome.results, seconds, computing, links, fold, outcome.uneven, machine)
    # As of a plan: 1 when it does not fit.
    return Result(run.as_dict(), lambda: print(run.table()), 0 if run.fit is None or run.fit.fits else 1)


def links_of(machine: Machine, precision: str) -> LinkModel:
    """Return the clock of a machine: its peak speeds, and its links, which are slower between nodes."""

    def link(source: int, destination: int) -> tuple[float, float]:
        near = source // machine.gpus_per_node == destination // machine.gpus_per_node
        return 5e-6, 1 / (machine.link if near else machine.network)

    peak = machine.fp16 if precision in ("fp16", "bf16") else machine.fp16 / 2
    return LinkModel(flops=peak, memory_bandwidth=machine.memory_bandwidth, link=link, free_startup=True)
