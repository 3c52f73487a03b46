"""Stages are cut anew while a pipeline trains: every K steps, from what the layers took on their ranks.

    step K-1 ends | exchange of seconds | 2,2 -> 3,1 | layer 2: weights, optimizer state, statistics | step K
                    every rank to all     same cut on    rank 1 ──one message──▶ rank 0
                                          every rank

[1] Every rank tells all others the seconds and FLOPs of its layers (`LayerProfile`). [2] All of them choose the same
cut: the one whose slowest stage is fastest, where a layer's seconds on another rank are those on its own, times the
ratio of the ranks' paces (seconds per FLOP). [3] When it is faster than the cut in use, each rank builds its part of
the model with the new cut as at the start of a job, and the state of each layer moves to the ranks that hold it now:
weights, optimizer state (of ZeRO the elements of this rank's shard), what techniques keep beside weights, and running
statistics. Gradients do not move: they are used up.

While it moves, a rank holds its part of the model twice. A schedule that drains computes the same sums whatever the cut
is, so the weights stay those of one device. The cut is in checkpoints.

Sources: Narayanan et al., PipeDream, SOSP 2019, section 3.1 (profile, then partition); torchgpipe's `balance_by_time`.
Both do it once, before the training.

Proved by: tests/train/test_repartition.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.half import is_half
from minidist.base.layout import offsets
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.checkpoint.parameter_shards import LocalShard
from minidist.job.checkpoint.resume import read_job_state
from minidist.job.config.pipeline_plan import cut_sizes, make_plan
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.job.train.job import Job, build
from minidist.job.train.recipe import parallelize
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.parallel.redistribute import NUMBER, Piece, lacking_bytes, redistribute, table_bytes
from minidist.pipeline.partition import by_slowest
from minidist.pipeline.runtime import LayerProfile, LayerTimes

Shards = dict[str, list[LocalShard]]  # what a technique keeps beside the weights of a data axis, by kind
WORTHWHILE = 0.95  # a new cut is taken when its slowest stage needs at most this share of the old one's seconds


@dataclass
class CutRun:
    """Steps that were made with one cut, as one rank saw them.

    partition: blocks of each stage. sizes: of the rank's data axes. skipped: steps whose update was left out.
    exchanges: how often seconds were exchanged. ranges, lacking: of the move that ended the run, the ranges that this
    rank had and needed, and the bytes of those that it needed and did not have.
    """

    partition: str
    sizes: list[AxisSizes] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0
    exchanges: int = 0
    ranges: int = 0
    lacking: int = 0


class Repartition:
    """Cuts the stages of one rank's job anew. runs: the cuts so far, the one in use last."""

    def __init__(self, comm: Comm, config: TrainConfig, profile: LayerProfile | None = None) -> None:
        self.comm, self.every = comm, config.repartition_every
        self.profile = LayerProfile() if profile is None else profile
        self.runs: list[CutRun] = []

    def start(self, job: Job) -> MeshStrategy:
        """Return the strategy of a job that begins, measured from now on."""
        strategy = parallelize(job, self.comm, self.profile)
        self.runs.append(CutRun(_text(sizes_of(job)), strategy.sizes()))
        return strategy

    def after_step(self, job: Job, strategy: MeshStrategy, done: int, skipped: int) -> tuple[Job, MeshStrategy]:
        """End step number `done` and return the job and the strategy of the next one: the same, or with another cut.

        skipped: of how many steps since the job began or was resumed the update was left out. After a multiple of K all
        ranks exchange what they measured (`exchange_volume`, purpose repartition); nothing is done after the last
        step.
        """
        run = self.runs[-1]
        run.steps += 1
        run.skipped = skipped - sum(earlier.skipped for earlier in self.runs[:-1])
        self.profile.end_step()
        if not self.every or done % self.every or done == job.config.steps:
            return job, strategy

        # All ranks have measured, or none has.
        times = self.profile.take(done)
        if times is None:
            return job, strategy
        run.exchanges += 1
        with purpose("repartition"):
            numbers = all_gather(self.comm, times.numbers()).reshape(self.comm.size, -1)
        sizes = choose_sizes(job, [LayerTimes.of(row) for row in numbers])
        return (job, strategy) if sizes == sizes_of(job) else self._move(job, strategy, sizes, done)

    def _move(self, job: Job, strategy: MeshStrategy, sizes: Sequence[int], done: int) -> tuple[Job, MeshStrategy]:
        """Return the job with another cut, in the same state, that of `done` steps."""
        # [1] A new model, with its part on this rank. What does not belong to it stays: data, techniques.
        config = job.config.model_copy(update={"partition": _text(sizes)})
        fresh = build(config, job.batches, self.comm, job.plan)
        fresh = replace(fresh, sampler=job.sampler, pool=job.pool)
        fresh = replace(fresh, batch=job.batch, keep_gradients=job.keep_gradients, extensions=job.extensions)
        run = self.runs[-1]
        there = self.start(fresh)

        # [2] The state, from the ranks that had it to those that have it now.
        state = _OptimizerState(there, strategy.step_count)
        extensions = fresh.extensions
        beside = [[_empty(extension.shards_after(axis, done)) for extension in extensions] for axis in there.data_axes]
        buffers = [(name, xp.empty(array.shape, array.dtype)) for name, array, _ in there.buffers()]
        held = [[extension.shards(axis) for extension in extensions] for axis in strategy.data_axes]
        have = _pieces(strategy, held, strategy.buffers())
        have += _state_pieces(strategy)
        need = [*_pieces(there, beside, buffers), *state.pieces()]
        run.ranges, run.lacking = len(have) + len(need), lacking_bytes(have, need)
        with purpose("repartition"):
            redistribute(self.comm, have, need, stride=self.comm.size // config.pp)

        # [3] As after a resume: optimizers take their state over, and everyone learns that the weights have changed.
        for axis, found, own in zip(there.data_axes, state.by_axis, beside, strict=True):
            for extension, shards in zip(extensions, own, strict=True):
                extension.load_shards(axis, shards)
            axis.optimizer.load_state_dict({"step": strategy.step_count, "state": found})
            axis.updated()
            if hasattr(axis.optimizer, "refresh"):  # an offloaded optimizer
                axis.optimizer.refresh()
        fresh.model.load_state_dict(dict(buffers), strict=False)
        return fresh, there


# --- which cut --------------------------------------------------------------------------------------------------------


def choose_sizes(job: Job, times: Sequence[LayerTimes]) -> list[int]:
    """Return the layers of each stage: of all cuts the one whose slowest stage is fastest, or those of the job.

    times: of every rank, in rank order. A stage on several ranks is as slow as the slowest of them.
    """
    sizes, config = sizes_of(job), job.config
    holders = make_plan(config, job.batches.accumulation).holders()
    per_stage = len(times) // config.pp
    ranks = {n: [p * per_stage + i for p in own for i in range(per_stage)] for n, own in holders.items()}
    bounds = offsets(sizes)

    # A rank's pace; in stages whose ranks differ, that of the slowest.
    paces = []
    for stage in range(len(sizes)):
        of_ranks = [times[r].seconds.sum() / max(times[r].flops.sum(), 1) for r in ranks[stage]]
        paces.append(float(max(of_ranks)))
    if not all(paces):
        return sizes  # nothing was measured on some rank

    # Each layer's work: its seconds where it is now, on a rank of pace 1. What is in front and behind does not move.
    work = np.concatenate(
        [
            np.max([times[r].seconds[a:b] for r in ranks[stage]], axis=0) / paces[stage]
            for stage, (a, b) in enumerate(pairwise(bounds))
        ]
    )
    work[0] += max(times[r].front for r in ranks[0]) / paces[0]
    work[-1] += max(times[r].back for r in ranks[len(sizes) - 1]) / paces[-1]

    best = [stage.last - stage.first + 1 for stage in by_slowest(work.tolist(), len(sizes), paces)]
    return best if slowest(work, best, paces) < WORTHWHILE * slowest(work, sizes, paces) else sizes


def slowest(work: Array, sizes: Sequence[int], paces: Sequence[float]) -> float:
    """Return the seconds of the slowest stage of a cut."""
    bounds = offsets(list(sizes))
    return max(float(work[a:b].sum()) * pace for (a, b), pace in zip(pairwise(bounds), paces, strict=True))


def sizes_of(job: Job) -> list[int]:
    """Return the layers of each stage of a job."""
    return cut_sizes(job.config, job.model, make_plan(job.config, job.batches.accumulation).stages)


def resumed_config(config: TrainConfig, batches: Batches) -> TrainConfig:
    """Return the config of a job that is resumed, with the cut of its checkpoint where that has as many stages."""
    if not (config.repartition_every and config.resume and config.save):
        return config
    state = read_job_state(Checkpoint(config.save, step=config.from_step))
    sizes = state.partition
    if sizes is None or len(sizes) != make_plan(config, batches.accumulation).stages:
        return config
    # The cut of another model does not fit; what differs is said when the job is resumed.
    if any(state.config.get(name) != getattr(config, name) for name in ("model", "layers")):
        return config
    return config.model_copy(update={"partition": _text(sizes)})


def exchange_volume(layers: int, ranks: int) -> int:
    """Return the numbers that all ranks together send for one exchange of their layers' times."""
    return ranks * (ranks - 1) * 2 * (layers + 1)


def repartition_bytes(runs: Sequence[Sequence[CutRun]]) -> int:
    """Return the bytes of all exchanges and moves. runs: those of each rank.

    A move sends the ranges of all ranks to every rank, and each rank the bytes that it needs and does not have: of
    each layer that gets a rank of another stage its weights and its optimizer state, once per replica. With ZeRO a
    rank has the shards that the new layout gives it, so elements move between replicas, too.
    """
    ranks, layers = len(runs), sum(map(int, runs[0][0].partition.split(",")))
    total = sum(run.exchanges for run in runs[0]) * exchange_volume(layers, ranks) * NUMBER
    for same in zip(*runs, strict=True):
        if any(run.ranges for run in same):
            total += table_bytes(sum(run.ranges for run in same), ranks) + sum(run.lacking for run in same)
    return total


def _text(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


# --- what a rank holds ------------------------------------------------------------------------------------------------


def _pieces(
    strategy: MeshStrategy, beside: Sequence[Sequence[Shards]], buffers: Sequence[tuple[object, ...]]
) -> list[Piece]:
    """Return weights, what techniques keep beside them, and running statistics of a rank.

    beside: of each data axis, what each technique keeps.
    """
    result = []
    for axis, own in zip(strategy.data_axes, beside, strict=True):
        for kind, shards in (("weights", axis.weights()), *(pair for kinds in own for pair in kinds.items())):
            result += [_piece(strategy, axis, kind, s.parameter.name, s.start, s.stop, s.values) for s in shards]
    for name, array, *_ in buffers:
        values = array.reshape(-1)  # type: ignore[attr-defined]
        result.append(Piece(f"buffers/{name}", 0, values.size, values))
    return result


def _state_pieces(strategy: MeshStrategy) -> list[Piece]:
    """Return the optimizer state of a rank."""
    return [
        _piece(strategy, axis, f"optimizer/{key}", p.name, start, stop, array)
        for axis in strategy.data_axes
        for p, start, stop in axis.state_ranges()
        for key, array in axis.optimizer.state.get(p.name, {}).items()
    ]


class _OptimizerState:
    """New arrays for the optimizer state of a strategy. by_axis: {parameter: {key: array}} of each of its data axes."""

    def __init__(self, strategy: MeshStrategy, steps: int) -> None:
        self.strategy = strategy
        self.by_axis: list[dict[str, dict[str, Array]]] = []
        for axis in strategy.data_axes:
            own: dict[str, dict[str, Array]] = {}
            for p, start, stop in axis.state_ranges() if steps else ():
                dtype = xp.dtype(xp.float32) if is_half(p.dtype) else p.dtype
                names = axis.optimizer.state_names(p.dtype, p.name)
                if names:
                    own[p.name] = {name: xp.empty(stop - start, dtype) for name in names}
            self.by_axis.append(own)

    def pieces(self) -> list[Piece]:
        """Return them, to be filled."""
        return [
            _piece(self.strategy, axis, f"optimizer/{key}", p.name, start, stop, array)
            for axis, own in zip(self.strategy.data_axes, self.by_axis, strict=True)
            for p, start, stop in axis.state_ranges()
            for key, array in own.get(p.name, {}).items()
        ]


def _piece(strategy: MeshStrategy, axis: DataAxis, kind: str, name: str, start: int, stop: int, values: Array) -> Piece:
    """Return elements of a parameter, or of what belongs to it; ranks of the other axes hold other shards of it."""
    place = f"tp {strategy.axes.tp.rank}" + (f" ep {strategy.axes.ep.rank}" if axis.experts else "")
    return Piece(f"{kind}/{name} of {place}", start, stop, values)


def _empty(expected: Mapping[str, tuple[str, Sequence[LocalShard]]]) -> Shards:
    """Return arrays for the shards that a technique expects (`Extension.shards_after`), to be filled."""
    return {
        kind: [replace(shard, values=xp.empty(shard.stop - shard.start, dtype)) for shard in shards]
        for kind, (dtype, shards) in expected.items()
    }
