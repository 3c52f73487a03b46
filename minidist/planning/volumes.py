"""What a job must send, by purpose, in closed form: printed beside what the trace counted, and asserted.

With Psi elements (padded) on a data axis of n ranks and k micro-batches, each rank sends (n-1)/n of, a step:

                     gradient_reduce    parameter_gather
    data parallel         2 Psi                 -            2 k Psi when every micro-batch is reduced
    ZeRO 1                  Psi               Psi
    ZeRO 2                k Psi               Psi
    ZeRO 3                k Psi             2 k Psi          a gather for forward, one for backward

ZeRO 3 with --reshard-after-forward false gathers k Psi; with g neighbours that keep a unit split, k Psi among all and k
Psi among these. Parameters below the persistence threshold are gathered once a step. Hybrid sharding with c copies has
n/c in the
place of n, and sums shards over the copies: 2 (c-1)/c of 1/n-th of Psi for each rank.

All ranks of a group together send, of an array of S elements: all-reduce 2 (n-1) S, reduce-scatter, all-gather and
broadcast (n-1) S, however it is cut. So a volume is such a number times the groups of an axis. What goes on
inside layers is in layer_volumes.py.
"""

from collections import Counter
from collections.abc import Sequence

from minidist import collectives
from minidist.config.pipeline_plan import make_plan
from minidist.config.train_config import Batches, TrainConfig
from minidist.optim import NORM_BLOCK
from minidist.parallel.data_parallel import DIGEST_BYTES, ddp_volume, startup_bytes
from minidist.parallel.fully_shard import fsdp_gather_volume, fsdp_volume
from minidist.parallel.local_sgd import local_sgd_volume
from minidist.parallel.zero import zero_volume
from minidist.pipeline.plan import Plan
from minidist.pipeline.runtime.shapes import WORDS
from minidist.pipeline.runtime.shared import ROW
from minidist.planning.layer_volumes import blocks_of_stages, forward_elements, layer_elements
from minidist.planning.plans import crossings_into, crossings_of
from minidist.train.strategies.data_axis import AxisSizes

NUMBER = 8  # a loss, and the sum of a block's squares, travel as one float64
ROW_OF_REPLICAS = 16  # which part of which tensor, and its fingerprint
ITEMSIZE = {"fp32": 4, "fp64": 8, "fp16": 2, "bf16": 2}


def closed_form_bytes(
    config: TrainConfig, batches: Batches, sizes: Sequence[Sequence[AxisSizes]], skipped: int = 0
) -> dict[str, int]:
    """Payload bytes that all ranks together send in a job of `config.steps` steps. sizes: of all ranks, in rank order.

    skipped: steps whose gradients overflowed: they are neither clipped, nor are parameters gathered after them (ZeRO 1,
    2).
    """
    dims = batches.dims
    pipeline = [
        sizes[rank] for rank in range(0, dims.ranks, dims.ranks // dims.pp)
    ]  # one rank of each stage; the others are alike
    total: Counter[str] = Counter()
    for volumes in (
        _data_axes(config, batches, pipeline, skipped),
        _norms(config, batches, pipeline, skipped),
        _losses(config, batches),
        _overflow(config, batches),
    ):
        total.update(volumes)
    total.update({name: count * ITEMSIZE[config.precision] for name, count in layer_elements(config, batches).items()})
    if config.check_replicas:
        parts = sum(axis.held for axes in sizes for axis in axes)
        total["metrics"] += config.steps * (dims.ranks - 1) * (dims.ranks * NUMBER + parts * ROW_OF_REPLICAS)
    if dims.pp > 1:
        total.update(_between_stages(config, batches, pipeline))
    return {name: total[name] for name in sorted(total) if total[name]}


def _group(batches: Batches, axis: AxisSizes) -> tuple[int, int]:
    """(ranks over which an axis's gradients are summed, how many such groups a stage has)."""
    dims = batches.dims
    return (dims.edp * dims.cp, dims.ep * dims.tp) if axis.experts else (dims.dp * dims.cp, dims.tp)


def _data_axes(
    config: TrainConfig, batches: Batches, pipeline: Sequence[Sequence[AxisSizes]], skipped: int
) -> Counter[str]:
    """The weights at the start, gradients, and what ZeRO gathers."""
    itemsize, steps, k = ITEMSIZE[config.precision], config.steps, batches.accumulation
    total: Counter[str] = Counter()
    plan = make_plan(config, k) if batches.dims.pp > 1 else None
    stages_replayed = plan is not None and config.recompute == "full" and config.offload != "activations"
    for rank, axis in ((rank, axis) for rank, stages in enumerate(pipeline) for axis in stages):
        n, groups = _group(batches, axis)
        if plan is not None:  # a stage that several ranks hold is run by each for some of the micro-batches
            k = len(plan.additions()[axis.stage][plan.holders()[axis.stage].index(rank)])
        reductions = steps * (k if config.synchronize_each or config.zero >= 2 else 1)
        copies, units, gradient = config.dp_replicate, sum(axis.units), sum(axis.buckets)
        shared = units - axis.resident  # elements that FSDP gathers for each use

        # The replicas' shard groups receive rank 0's weights, and then the other copies of each shard do.
        total["startup"] += groups * copies * startup_bytes(axis.units, itemsize, n // copies)
        total["startup"] += groups * n // copies * (copies - 1) * units * itemsize

        # What the strategy sends, each as its own module says: per reduction and per gather.
        if config.zero == 3:
            sent = fsdp_volume(shared, n, copies=copies, reshard=config.reshard, replayed=stages_replayed)
            sent["gradient_reduce"] = fsdp_volume(gradient, n, copies=copies)["gradient_reduce"]
            gathers = steps * k * sent["parameter_gather"]
            gathers += (steps - skipped) * fsdp_gather_volume(axis.resident, n, copies)
            if plan is not None and axis.stage + 1 < plan.stages:  # the empty pass by which shapes are learned
                gathers += crossings_of(plan)[2] * fsdp_gather_volume(shared, n, copies)
        elif config.zero:
            sent = zero_volume(gradient, units, n)
            gathers = (steps - skipped) * sent["parameter_gather"]
        else:
            sent = ddp_volume(gradient, n)
            gathers = 0
        if config.local_steps:
            gathers += -(-steps // config.local_steps) * local_sgd_volume(units, n)["parameter_gather"]
        reduced = sent["gradient_reduce"] * itemsize if axis.compressed is None else axis.compressed
        total["gradient_reduce"] += reductions * groups * reduced
        total["parameter_gather"] += gathers * groups * itemsize
    return total


def _norms(
    config: TrainConfig, batches: Batches, pipeline: Sequence[Sequence[AxisSizes]], skipped: int
) -> Counter[str]:
    """Block sums: gathered where gradients are sharded, added up over tiles, joined over stages."""
    if config.clip is None:
        return Counter()
    dims, all_blocks, nbytes = batches.dims, 0, 0
    for axis in (axis for stages in pipeline for axis in stages):
        n, groups = _group(batches, axis)
        blocks = sum(-(-unit // NORM_BLOCK) for unit in axis.units)
        all_blocks += blocks
        nbytes += (n - config.dp_replicate) * groups * blocks if config.zero else 0
        nbytes += 2 * (dims.tp - 1) * dims.dp * dims.cp * blocks
        nbytes += 2 * (dims.ep - 1) * dims.edp * dims.cp * dims.tp * blocks if axis.experts else 0
    if dims.pp > 1:
        places = sum(map(len, make_plan(config, batches.accumulation).holders().values()))
        nbytes += 2 * (dims.pp - 1) * dims.dp * dims.cp * dims.tp * (places + all_blocks)
    return Counter(clip_norm=(config.steps - skipped) * nbytes * NUMBER)


def _losses(config: TrainConfig, batches: Batches) -> Counter[str]:
    noise = 2 * (batches.dims.dp * batches.dims.cp - 1) if config.noise_scale else 0  # an all-reduce of one number
    return Counter(metrics=config.steps * (losses_bytes(batches) + noise * NUMBER))


def losses_bytes(batches: Batches) -> int:
    """Every micro-batch's loss, once: to all ranks of a pipeline, then to all that see other rows."""
    dims, k = batches.dims, batches.accumulation
    n = dims.dp * dims.cp
    to_stages = n * dims.tp * 2 * (dims.pp - 1) * k
    to_rows = dims.pp * dims.tp * n * (n - 1) * k
    return (to_stages + to_rows) * NUMBER


def gathered_elements(config: TrainConfig, batches: Batches, sizes: Sequence[Sequence[AxisSizes]]) -> tuple[int, int]:
    """What one forward pass of all micro-batches gathers under ZeRO 3, and what is gathered once after each update."""
    dims, passes, once = batches.dims, 0, 0
    if config.zero != 3:
        return 0, 0
    plan = make_plan(config, batches.accumulation) if dims.pp > 1 else None
    for rank in range(dims.pp):
        for axis in sizes[rank * (dims.ranks // dims.pp)]:
            n, groups = _group(batches, axis)
            k = (
                batches.accumulation
                if plan is None
                else len(plan.additions()[axis.stage][plan.holders()[axis.stage].index(rank)])
            )
            passes += k * (n - config.dp_replicate) * groups * (sum(axis.units) - axis.resident)
            once += (n - config.dp_replicate) * groups * axis.resident
    return passes, once


def crossing_elements(config: TrainConfig, batches: Batches) -> int:
    """Elements of activations that go from rank to rank in all pipelines in a step (an asynchronous plan: in the job)."""
    if batches.dims.pp == 1:
        return 0
    plan, border = make_plan(config, batches.accumulation), _border(config, batches)
    sent = crossings_of(plan)[0] * border
    if config.model == "mlp" and blocks_of_stages(config, batches, plan.stages)[-1][0] == config.layers:
        sent -= crossings_into(plan, plan.stages - 1) * (
            border - border // batches.dims.tp
        )  # the last layer takes rows: only a tile each
    return sent


def evaluation_bytes(
    config: TrainConfig, batches: Batches, sizes: Sequence[Sequence[AxisSizes]], first_step: int
) -> Counter[str]:
    """What evaluations add to the closed form, of all ranks, in a job that began at `first_step`. sizes: see
    `closed_form_bytes`.

    Small parameters that stay whole (ZeRO 3) are gathered once after each update, by who needs them first: then by the
    evaluation.
    """
    every = config.evaluate_every
    if not every:
        return Counter()
    times = config.steps // every - first_step // every
    gathered, small = gathered_elements(config, batches, sizes)
    elements = sum(forward_elements(config, batches).values()) + crossing_elements(config, batches) + gathered + small
    itemsize, before_a_step = ITEMSIZE[config.precision], times - (config.steps % every == 0)
    result = Counter(evaluation=times * (elements * itemsize + losses_bytes(batches)))
    if small:
        result["parameter_gather"] -= before_a_step * small * itemsize
    return result


def _overflow(config: TrainConfig, batches: Batches) -> Counter[str]:
    """Float16: one byte by recursive doubling over all ranks of all axes."""
    n = batches.dims.ranks
    flags = (
        sum(collectives.volume("all_reduce", "recursive_doubling", 1, n, rank).elements for rank in range(n))
        if n > 1 and config.precision == "fp16"
        else 0
    )
    return Counter(overflow=config.steps * flags)


# --- pipelines --------------------------------------------------------------------------------------------------------


def _between_stages(config: TrainConfig, batches: Batches, pipeline: Sequence[Sequence[AxisSizes]]) -> Counter[str]:
    """Activations and their gradients, what stages share, and what is said at the start."""
    dims, itemsize, plan = batches.dims, ITEMSIZE[config.precision], make_plan(config, batches.accumulation)
    pipelines, p = dims.dp * dims.cp * dims.tp, dims.pp
    paths = crossings_of(plan)[1]
    places = [
        (axis.stage, rank, name, size)
        for rank, axes in enumerate(pipeline)
        for axis in axes
        for name, size in axis.parameters.items()
    ]
    total: Counter[str] = Counter()
    total["startup"] = pipelines * (
        (p - 1) * DIGEST_BYTES + p * (p - 1) * NUMBER + (p - 1) * len(places) * ROW * 8 + paths * WORDS * 8
    )
    if config.replicas is not None:  # who else has my stage: everybody tells everybody
        total["startup"] += p * (p - 1) * 2 * NUMBER
    shards = (
        dims.dp * dims.cp // config.dp_replicate if config.zero >= 2 else 1
    )  # each rank sends its shard of what is shared
    for name in {place[2] for place in places}:
        sites = [place for place in places if place[2] == name]
        ranks = len({rank for _, rank, _, _ in sites})
        tied = len({stage for stage, _, _, _ in sites}) > 1
        size = sites[0][3] if config.zero < 2 else -(-sites[0][3] // (shards * NORM_BLOCK)) * NORM_BLOCK
        if plan.updates != "flush" and not tied:  # replicas of a stage: an all-reduce a round of mini-batches
            total["gradient_reduce"] += -(-config.steps // len(sites)) * 2 * (len(sites) - 1) * size * itemsize
        elif tied or config.zero < 2:
            total["tied" if tied else "gradient_reduce"] += (
                config.steps * pipelines * len(sites) * (ranks - 1) * size * itemsize
            )
    if config.zero >= 2:
        total["gradient_reduce"] += (
            config.steps * sum(_copied_units(plan, pipeline, batches, axes) for axes in pipeline) * itemsize
        )
    sent = crossing_elements(config, batches)
    for name in ("pipeline_activation", "pipeline_gradient"):  # an asynchronous plan is the whole job
        total[name] = (config.steps if plan.updates == "flush" else 1) * sent * itemsize
    return total


def _border(config: TrainConfig, batches: Batches) -> int:
    """Elements of one micro-batch's activation between two stages, of all ranks of one stage."""
    dims = batches.dims
    border = dims.dp * batches.micro_batch * config.width
    if config.model != "mlp":
        border *= config.context
    border *= 1 if config.sequence_parallel else dims.tp
    if config.experts:  # the auxiliary loss travels along
        border += dims.dp * dims.cp * dims.tp * max(1, 4 // ITEMSIZE[config.precision])
    return border


def _copied_units(
    plan: Plan, pipeline: Sequence[Sequence[AxisSizes]], batches: Batches, axes: Sequence[AxisSizes]
) -> int:
    """Elements of sharded gradients that one rank's stages send to the other ranks of the same stages, all replicas
    together.
    """
    holders, total = plan.holders(), 0
    stages_of = {
        name: {axis.stage for axes in pipeline for axis in axes if name in axis.parameters}
        for axis in axes
        for name in axis.parameters
    }
    for axis in axes:
        if any(len(stages_of[name]) > 1 for name in axis.parameters):
            continue  # the tied weight, which has its own unit
        _, groups = _group(batches, axis)
        total += (len(holders[axis.stage]) - 1) * sum(axis.units) * groups
    return total
