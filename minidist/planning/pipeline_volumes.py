"""What the ranks of pipelines send to each other, in closed form: activations, shared gradients, and the start.

    rank 0   stage 0  ──activation──▶  stage 1   rank 1        per micro-batch and boundary between two ranks
                      ◀──gradient────

A weight that two stages share (a tied embedding), and a stage that two ranks hold (bidirectional schedules), cost a sum
of their gradients per step.

Proved by: tests/planning/test_volumes.py, tests/train/test_pipelines.py
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple

from minidist.core.optim import NORM_BLOCK
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.messages import MESSAGE
from minidist.core.pipeline.runtime.reduction import ROW
from minidist.data import load_dataset
from minidist.job.config.models import ITEMSIZE, activation_shape
from minidist.job.config.pipeline_plan import blocks_of_stages, make_plan, period_of, replicas_of, streams
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.job.train.strategies.data_axis import AxisSizes
from minidist.parallel.replica_guard import DIGEST_BYTES

Sizes = Sequence[Sequence[AxisSizes]]  # of each rank, the sizes of its stages
NUMBER = 8  # bytes of a loss, or of the sum of a block's squares: one float64


class Site(NamedTuple):
    """One parameter of one stage on one rank of a pipeline."""

    stage: int
    rank: int
    size: int


def group_of(batches: Batches, axis: AxisSizes) -> tuple[int, int]:
    """Return the ranks over which an axis's gradients are summed, and how many such groups a stage has."""
    dims = batches.dims
    return (dims.edp * dims.cp, dims.ep * dims.tp) if axis.experts else (dims.dp * dims.cp, dims.tp)


def pipeline_bytes(config: TrainConfig, batches: Batches, pipeline: Sizes, first_step: int = 0) -> Counter[str]:
    """Return the bytes that all pipelines send between their stages, in `config.steps` steps after `first_step` others.

    pipeline: sizes of one rank of each stage.
    """
    itemsize, plan = ITEMSIZE[config.precision], make_plan(config, batches.accumulation)
    # Every parameter on every rank that holds it, with the size of that rank's part.
    sites: dict[str, list[Site]] = defaultdict(list)
    for rank, axes in enumerate(pipeline):
        for axis in axes:
            for name, size in axis.parameters.items():
                sites[name].append(Site(axis.stage, rank, size))

    # Gradients of parameters that several ranks have, then activations forward and their gradients backward.
    if plan.updates == "flush":
        elements = _synchronous_gradients(config, batches, plan, pipeline, sites)
        crossing = config.steps * crossing_elements(config, batches)
    else:
        lengths = stream_lengths(config, batches, first_step)
        elements = _asynchronous_gradients(plan, pipeline, sites, lengths)
        crossing = sum(crossing_elements(config, batches, length) for length in lengths)
    total = Counter({purpose: count * itemsize for purpose, count in elements.items()})
    total["startup"] = _startup(config, batches, plan, pipeline)
    total["pipeline_activation"] = total["pipeline_gradient"] = crossing * itemsize
    return total


def _startup(config: TrainConfig, batches: Batches, plan: Plan, pipeline: Sizes) -> int:
    """Return the bytes before the first step with a plan: of the plan, and of the shapes at boundaries."""
    dims = batches.dims
    crossed = sum(a != b for path, _ in input_shapes(plan, batches) for a, b in pairwise(path))
    return plan_bytes(config, batches, pipeline) + crossed * dims.cp * dims.tp * MESSAGE


def other_plans_bytes(config: TrainConfig, batches: Batches, pipeline: Sizes, used: set[int]) -> int:
    """Return the bytes of plans by which no step was made. used: the numbers of micro-batches of the others.

    A resumed job has a plan for its first batch, and may go on with a larger one.
    """
    agreed = set[int]().union(*(axis.more.get("plans", ()) for axes in pipeline for axis in axes))
    return len(agreed - used) * plan_bytes(config, batches, pipeline)


def plan_bytes(config: TrainConfig, batches: Batches, pipeline: Sizes) -> int:
    """Return the bytes with which all ranks agree on a plan: its fingerprints, the seeds, and who holds what."""
    dims, p = batches.dims, batches.dims.pp
    sites = sum(len(axis.parameters) for axes in pipeline for axis in axes)
    sent = dims.dp * dims.cp * dims.tp * (p - 1) * (DIGEST_BYTES + p * NUMBER + sites * ROW * 8)
    # Replicated stages: every rank tells every other which stage it holds.
    return sent + (p * (p - 1) * 2 * NUMBER if max(replicas_of(config) or [1]) > 1 else 0)


def _synchronous_gradients(
    config: TrainConfig, batches: Batches, plan: Plan, pipeline: Sizes, sites: Mapping[str, Sequence[Site]]
) -> Counter[str]:
    """Return the elements of gradients that ranks of one pipeline sum per step, of all pipelines."""
    dims, sent = batches.dims, Counter[str]()
    # With ZeRO 2 and 3 each rank sends its shard.
    shards = dims.dp * dims.cp // config.dp_replicate
    for shared in sites.values():
        size = _shard(shared[0].size, shards) if config.zero >= 2 else shared[0].size
        elements = dims.dp * dims.cp * dims.tp * len(shared) * (len({site.rank for site in shared}) - 1) * size
        if len({site.stage for site in shared}) > 1:
            sent["tied"] += config.steps * elements
        elif config.zero < 2:
            sent["gradient_reduce"] += config.steps * elements
    # Sharded units of stages that several ranks of one pipeline hold (bidirectional schedules).
    if config.zero >= 2:
        copied = sum(_copied_units(plan, pipeline, batches, axes, shards) for axes in pipeline)
        sent["gradient_reduce"] += config.steps * copied * config.dp_replicate
    return sent


def _asynchronous_gradients(
    plan: Plan, pipeline: Sizes, sites: Mapping[str, Sequence[Site]], lengths: Sequence[int]
) -> Counter[str]:
    """Return the elements of gradients of all updates, each of a round of mini-batches, in streams of such lengths.

    An all-reduce over a stage's replicas, or to and from the first rank that has a shared parameter.
    """
    sent: Counter[str] = Counter()
    # Of the stages whose replicas reduce by an algorithm with a separate formula: once for all their parameters.
    reduced = {axis.stage: axis.reduced for axes in pipeline for axis in axes if axis.reduced is not None}
    updates_of: dict[int, int] = {}
    for shared in sites.values():
        ranks_of = Counter(site.stage for site in shared)
        rounds = plan.batch if plan.updates == "2bw" else lcm(*ranks_of.values())
        updates = sum(-(-length // rounds) for length in lengths)
        if len(ranks_of) == 1 and shared[0].stage in reduced:
            updates_of[shared[0].stage] = updates
        else:
            purpose = "tied" if len(ranks_of) > 1 else "gradient_reduce"
            sent[purpose] += updates * 2 * (len(shared) - 1) * shared[0].size
    sent["gradient_reduce"] += sum(updates * reduced[stage] for stage, updates in updates_of.items())
    return sent


def stream_lengths(config: TrainConfig, batches: Batches, first_step: int) -> list[int]:
    """Return the micro-batches of each stream of an asynchronous job of `config.steps` steps after `first_step`."""
    whole = config.model_copy(update={"steps": first_step + config.steps})
    return [batches.accumulation * len(steps) for steps in streams(whole, first_step)]


def crossing_elements(config: TrainConfig, batches: Batches, microbatches: int | None = None) -> int:
    """Return the elements of activations sent between ranks of all pipelines per step.

    microbatches: of a stream of an asynchronous pipeline, whose paths come again and again.
    """
    if batches.dims.pp == 1:
        return 0
    plan = make_plan(config, batches.accumulation)
    rank_of, k = plan.rank_of_stage(), batches.accumulation
    times = dict.fromkeys(range(plan.microbatches), 1)
    if microbatches is not None:
        period = period_of(config, k)
        times = {i: len(range(i, microbatches, period)) for i in range(period)}

    # An MLP's last layer is row-parallel: each of its ranks needs only its shard of the columns.
    cut_last = config.model == "mlp" and blocks_of_stages(config, plan.stages)[-1][0] == config.layers
    shape = activation_shape(config, load_dataset(config.data))
    sent = 0
    for stage in range(1, plan.stages):
        crossing = {i: n for i, n in times.items() if rank_of[stage - 1, i] != rank_of[stage, i]}
        for replica in batches.shares.rows:
            boundary = sum(n * _boundary(config, batches, replica[i % k], shape) for i, n in crossing.items())
            sent += boundary // batches.dims.tp if cut_last and stage == plan.stages - 1 else boundary
    return sent


def input_shapes(plan: Plan, batches: Batches) -> list[tuple[tuple[int, ...], int]]:
    """Return the distinct (path, rows) of the micro-batches of each pipeline: stages learn the shapes of each once."""
    rank_of, k = plan.rank_of_stage(), batches.accumulation
    paths = [tuple(rank_of[stage, i] for stage in range(plan.stages)) for i in range(plan.microbatches)]
    return [
        shape
        for replica in batches.shares.rows
        for shape in sorted({(path, replica[i % k]) for i, path in enumerate(paths)})
    ]


def _boundary(config: TrainConfig, batches: Batches, rows: int, shape: Sequence[int]) -> int:
    """Return the elements of one micro-batch's activation between two stages, of all ranks of one stage's replica.

    shape: of the activation of one row.
    """
    dims = batches.dims
    boundary = rows * prod(shape)
    boundary *= 1 if config.sequence_parallel else dims.tp
    # The auxiliary loss travels with the activation, as one float32.
    if config.experts:
        boundary += dims.cp * dims.tp * max(1, 4 // ITEMSIZE[config.precision])
    return boundary


def _copied_units(plan: Plan, pipeline: Sizes, batches: Batches, axes: Sequence[AxisSizes], shards: int) -> int:
    """Return the elements of gradients in `shards` that one rank's stages send to other ranks of the same stages."""
    holders, total = plan.holders(), 0
    stages_of = {
        name: {axis.stage for axes in pipeline for axis in axes if name in axis.parameters}
        for axis in axes
        for name in axis.parameters
    }
    for axis in axes:
        # A tied weight has a separate unit, which is summed over its stages, too, and counted there.
        tied = [_shard(size, shards) * shards for name, size in axis.parameters.items() if len(stages_of[name]) > 1]
        units = 0 if len(tied) == len(axis.parameters) else sum(axis.units) - sum(tied)
        _, groups = group_of(batches, axis)
        total += (len(holders[axis.stage]) - 1) * units * groups
    return total


def _shard(elements: int, shards: int) -> int:
    """Return the elements of one shard of a unit, with padding."""
    return -(-elements // (shards * NORM_BLOCK)) * NORM_BLOCK
