"""What a job must send, by purpose, in closed form: printed next to what the trace counted, and asserted.

With Psi elements (padded) on a data axis of n ranks and k micro-batches, each rank sends (n-1)/n of, per step:

                     gradient_reduce    parameter_gather
    data parallel         2 Psi                 -            2 k Psi when every micro-batch is reduced
    ZeRO 1                  Psi               Psi
    ZeRO 2                k Psi               Psi
    ZeRO 3                k Psi             2 k Psi          a gather for forward, one for backward

ZeRO 3 with --reshard-after-forward false gathers k Psi; with g neighbours that keep a unit sharded, k Psi among all
ranks and k Psi among these. Parameters below the persistence threshold are gathered once per step. Hybrid sharding with
c copies has n/c instead of n, and sums shards over the copies: 2 (c-1)/c of 1/n-th of Psi for each rank.

All ranks of a group together send, of an array of S elements: all-reduce 2 (n-1) S, reduce-scatter, all-gather and
broadcast (n-1) S, however it is cut. So a volume is such a number times the groups of an axis. Messages inside layers
are in layer_volumes.py, those between the stages of a pipeline in pipeline_volumes.py.

Proved by: tests/planning/test_volumes.py, tests/train/test_sharded.py, tests/train/test_evaluate.py
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from minidist.core.pipeline.plan import Plan
from minidist.data import Shares
from minidist.job.config.models import ITEMSIZE
from minidist.job.config.pipeline_plan import make_plan, period_of
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.job.train.state import Phase
from minidist.job.train.strategies.data_axis import AxisSizes
from minidist.parallel.replica_guard import startup_bytes
from minidist.parallel.running_statistics import statistics_bytes
from minidist.parallel.volume import gradient_volume
from minidist.planning.layer_volumes import forward_elements, layer_elements
from minidist.planning.pipeline_volumes import (
    NUMBER,
    crossing_elements,
    group_of,
    input_shapes,
    other_plans_bytes,
    pipeline_bytes,
    stream_lengths,
)
from minidist.techniques import (
    AxisRun,
    Extension,
    Run,
    drains,
    joins_replicas,
    of_job,
    reduces_each,
    replayed,
    trains_alone,
    wrapper_options,
)


def closed_form_bytes(
    config: TrainConfig,
    batches: Batches,
    sizes: Sequence[Sequence[AxisSizes]],
    skipped: int = 0,
    first_step: int = 0,
    runs: Sequence[tuple[Shares, int]] | None = None,
) -> dict[str, int]:
    """Return the payload bytes that all ranks together send in a job of `config.steps` steps, by purpose.

    sizes: of all ranks, in rank order. skipped: steps whose update was left out; nothing is clipped in them, and no
    parameters are gathered after them (ZeRO 1, 2). first_step: how many steps were done before. runs: the rows of all
    ranks, and for how many steps, where they change.
    """
    dims, runs = batches.dims, runs or [(batches.shares, config.steps)]
    # One rank of each stage; the pipeline is the slowest axis of the mesh.
    pipeline = [sizes[rank] for rank in range(0, dims.ranks, dims.ranks // dims.pp)]
    total: Counter[str] = Counter()

    # Where a pipeline does not drain after every step, it does after every stream of batches.
    moments = config.steps
    if not drains(config):
        moments = len(stream_lengths(config, batches, first_step))
    itemsize, extensions = ITEMSIZE[config.precision], list(of_job(config))
    run = Run(config, batches, dims.ranks, config.steps, first_step, moments, sizes, itemsize, runs, skipped)

    # What depends on the rows of a step, for each run of steps with the same rows: on the data axis, inside layers, and
    # between stages. What is sent before the first step is sent once, and for each number of micro-batches that is new.
    begun, done = set[int](), first_step
    for shares, steps in runs:
        part, same = config.model_copy(update={"steps": steps}), batches.with_shares(shares)
        piece, done = run._replace(batches=same, steps=steps, done=done), done + steps
        begins, learns = not begun, shares.accumulation not in begun
        begun.add(shares.accumulation)
        total.update(_data_axes(piece, pipeline, extensions, skipped=skipped * begins, begins=begins, learns=learns))
        inside = {name: count * itemsize for name, count in layer_elements(part, same).items()}
        between = pipeline_bytes(part, same, pipeline, first_step) if dims.pp > 1 else {}
        for sent in (inside, between):
            total.update({name: count for name, count in sent.items() if learns or name != "startup"})
        # Of losses. In an asynchronous pipeline the last stage sends them to every other rank.
        losses = losses_bytes(same) if drains(config) else (dims.pp - 1) * same.accumulation * NUMBER
        total["metrics"] += steps * losses
    total["startup"] += other_plans_bytes(config, batches, pipeline, begun)

    # What techniques add.
    for extension in extensions:
        total.update(extension.bytes_sent(run))
    return {name: total[name] for name in sorted(total) if total[name]}


def phases_bytes(
    config: TrainConfig,
    batches: Batches,
    phases: Sequence[Sequence[Phase]],
    first_step: int = 0,
    runs: Sequence[tuple[Shares, int]] | None = None,
) -> Counter[str]:
    """Return what a job sends: with each layout that it had, what a job of its steps sends, evaluations included.

    phases: of every rank that trains, in rank order. first_step: how many steps were done before. runs: as for
    `closed_form_bytes`, of all phases one after the other.
    """
    total: Counter[str] = Counter()
    done, rest = first_step, list(runs or ())
    for same in zip(*phases, strict=True):
        first, sizes = same[0], [phase.sizes for phase in same]
        of_phase, rest = cut_runs(rest, first.steps)
        part = config.model_copy(update={**first.changed, "steps": first.steps})
        total.update(closed_form_bytes(part, batches, sizes, first.skipped, done, of_phase))
        # Evaluations are counted up to the step with which the layout ends.
        part = part.model_copy(update={"steps": done + first.steps})
        total.update(evaluation_bytes(part, batches, sizes, done, of_phase))
        done += first.steps
    return total


def cut_runs(
    runs: Sequence[tuple[Shares, int]], steps: int
) -> tuple[list[tuple[Shares, int]], list[tuple[Shares, int]]]:
    """Return the runs of the first `steps` steps, and those of the others."""
    first: list[tuple[Shares, int]] = []
    rest = list(runs)
    while rest and steps:
        shares, count = rest.pop(0)
        taken = min(count, steps)
        first.append((shares, taken))
        steps -= taken
        if count > taken:
            rest.insert(0, (shares, count - taken))
    return first, rest


def _microbatches(plan: Plan | None, batches: Batches, axis: AxisSizes, rank: int) -> int:
    """Return the micro-batches that pipeline rank `rank` runs of an axis's stage, which several ranks may share."""
    if plan is None:
        return batches.accumulation
    from minidist.pipeline.passes import additions

    return len(additions(plan)[axis.stage][plan.holders()[axis.stage].index(rank)])


def _data_axes(
    run: Run,
    pipeline: Sequence[Sequence[AxisSizes]],
    extensions: Sequence[Extension],
    *,
    skipped: int,
    begins: bool,
    learns: bool,
) -> Counter[str]:
    """Return the bytes of the weights at the start, of gradients, and of what ZeRO gathers.

    begins: whether the job does. learns: whether a pipeline learns its shapes before these steps.
    """
    config, batches, itemsize, steps = run.config, run.batches, run.itemsize, run.steps
    total: Counter[str] = Counter()
    plan = make_plan(config, batches.accumulation) if batches.dims.pp > 1 else None
    alone = trains_alone(config)
    again = replayed(config) if plan is not None else ()
    # One rank of each stage stands for all: its axis has n ranks, and the stage has `groups` such axes.
    for rank, axis in ((rank, axis) for rank, stages in enumerate(pipeline) for axis in stages):
        n, groups = ranks, of_stage = group_of(batches, axis)
        copies = config.dp_replicate
        # Sharded replicas that train alone are data axes that send nothing to each other.
        if alone and config.zero:
            n, groups, copies = n // copies, groups * copies, 1
        k = _microbatches(plan, batches, axis, rank)
        # ZeRO 2 and 3 reduce after every micro-batch, the others once per step.
        per_step = k if reduces_each(config) or config.zero >= 2 else 1
        reductions = steps * per_step
        units = sum(axis.units)

        # The replicas' shard groups receive rank 0's weights, and then the other copies of each shard do.
        if begins:
            total["startup"] += groups * copies * startup_bytes(axis.units, itemsize, n // copies)
            total["startup"] += groups * n // copies * (copies - 1) * units * itemsize

        # What the strategy sends: a reduction, and the gathers of all steps.
        reduced, gathers = gradient_volume(config.zero, sum(axis.buckets), n, copies), 0
        if config.zero == 3:
            empty = _empty_passes(plan, batches, axis.stage, rank) if learns and plan is not None else 0
            updates = steps - skipped
            gathers, before = _gathers(run, axis, (n, copies), k, axis.stage in again, updates=updates, empty=empty)
            total["startup"] += before * groups * itemsize
        elif config.zero:
            gathers = (steps - skipped) * (n - 1) * units

        if axis.norms:
            total["metrics"] += groups * _statistics(run, plan, axis, (n, copies), reductions)
        # An algorithm that is neither the ring nor ordered states its own.
        elements = reduced if axis.reduced is None or n == 1 else axis.reduced
        total["gradient_reduce"] += reductions * groups * elements * itemsize

        # What techniques add to an axis, or save.
        of_axis = AxisRun(axis, ranks, of_stage, per_step, elements * itemsize, k, axis.stage in again)
        for extension in extensions:
            total.update(extension.bytes_of_axis(run, of_axis))
        total["parameter_gather"] += gathers * groups * itemsize
    return total


def _statistics(run: Run, plan: Plan | None, axis: AxisSizes, group: tuple[int, int], reductions: int) -> int:
    """Return the bytes of the running statistics of an axis's norms. group: its ranks, and the copies of each shard."""
    config, (n, copies) = run.config, group
    joined, sent = joins_replicas(config), 0
    if not joined and (config.zero or not trains_alone(config)):
        sent = reductions * statistics_bytes(axis.norms, n, copies)
    if plan is not None:
        # The pipeline's own at the end of a step: ranks of one stage first; with ZeRO 2 and 3 after the units'.
        holders = len(plan.holders()[axis.stage])
        sent += run.steps * n * statistics_bytes(axis.norms, holders) // holders
        if not joined:
            sent += run.steps * statistics_bytes(axis.norms, n) * (config.zero >= 2)
    return sent


def _empty_passes(plan: Plan, batches: Batches, stage: int, rank: int) -> int:
    """Return how many empty passes, by which shapes are learned, go through a rank's stage and on to another one."""
    if stage + 1 == plan.stages:
        return 0
    return sum(path[stage] == rank for path, _ in input_shapes(plan, batches)) // batches.dp


def _gathers(
    run: Run, axis: AxisSizes, group: tuple[int, int], microbatches: int, again: bool, *, updates: int, empty: int
) -> tuple[int, int]:
    """Return the elements that ZeRO 3 gathers in the steps of a run, and in the empty passes before them.

    group: the ranks, and the copies of each shard among them. again: whether the stage runs forward again before its
    backward. updates, empty: how many there are. Units that stay gathered are gathered once after each update, and in
    the first empty pass in place of the first step.
    """
    n, copies = group
    shared = sum(axis.units) - axis.resident  # elements that FSDP gathers for each use
    gather, resident = (n - copies) * shared, (n - copies) * axis.resident
    reshard = wrapper_options(run.config).get("reshard_after_forward", True)
    # For backward: among all ranks again, or not, or among `reshard` neighbours. There are n / g groups of g, and in
    # each of them (g-1)/g of the elements reach each of g ranks.
    for_backward = gather * reshard if isinstance(reshard, bool) else n // reshard * (reshard - 1) * shared
    for_backward += gather * again
    first = resident * min(empty, 1)
    in_steps = run.steps * microbatches * (gather + for_backward) + updates * resident
    return in_steps - first, empty * gather + first


def losses_bytes(batches: Batches) -> int:
    """Return the bytes of every micro-batch's loss: to all ranks of a pipeline, then to those with other rows."""
    dims, k = batches.dims, batches.accumulation
    n = dims.dp * dims.cp
    to_stages = n * dims.tp * 2 * (dims.pp - 1) * k
    to_rows = dims.pp * dims.tp * n * (n - 1) * k
    return (to_stages + to_rows) * NUMBER


def gathered_elements(config: TrainConfig, batches: Batches, sizes: Sequence[Sequence[AxisSizes]]) -> tuple[int, int]:
    """Return the elements that ZeRO 3 gathers in one forward pass of all micro-batches, and once after each update."""
    dims, passes, once = batches.dims, 0, 0
    if config.zero != 3:
        return 0, 0
    plan = make_plan(config, batches.accumulation) if dims.pp > 1 else None
    for rank in range(dims.pp):
        for axis in sizes[rank * (dims.ranks // dims.pp)]:
            n, groups = group_of(batches, axis)
            k = _microbatches(plan, batches, axis, rank)
            passes += k * (n - config.dp_replicate) * groups * (sum(axis.units) - axis.resident)
            once += (n - config.dp_replicate) * groups * axis.resident
    return passes, once


def evaluation_bytes(
    config: TrainConfig,
    batches: Batches,
    sizes: Sequence[Sequence[AxisSizes]],
    first_step: int,
    runs: Sequence[tuple[Shares, int]] | None = None,
) -> Counter[str]:
    """Return what evaluations add to `closed_form_bytes`, in a job that began at `first_step`.

    Small parameters that stay gathered (ZeRO 3) are gathered once after each update, when they are needed first; in
    these steps that is in the evaluation. A batch that is cut anew is evaluated in the new micro-batches, and one that
    grows in its first ones.
    """
    every = config.evaluate_every
    if not every:
        return Counter()
    result, done = Counter[str](), first_step
    for shares, steps in runs or [(batches.shares, config.steps - first_step)]:
        same = batches
        if shares.samples == batches.global_batch:
            same = replace(batches, accumulation=shares.accumulation, micro_batch=shares.largest)
        # Evaluations follow the multiples of `every` in (done, done + steps].
        times = (done + steps) // every - done // every
        done += steps
        if times:
            result["evaluation"] += times * _evaluation(config, same, sizes)
    # Steps after an evaluation find the small parameters gathered already.
    small = gathered_elements(config, batches, sizes)[1]
    if small:
        before_a_step = config.steps // every - first_step // every - (config.steps % every == 0)
        result["parameter_gather"] -= before_a_step * small * ITEMSIZE[config.precision]
    return result


def _evaluation(config: TrainConfig, batches: Batches, sizes: Sequence[Sequence[AxisSizes]]) -> int:
    """Return the bytes of all passes of one evaluation."""
    gathered, small = gathered_elements(config, batches, sizes)
    elements = sum(forward_elements(config, batches).values()) + gathered + small
    # Every path of an asynchronous pipeline takes a micro-batch, so there may be more than a step has.
    losses = losses_bytes(batches)
    if not drains(config):
        period = period_of(config, batches.accumulation)
        taken = -(-batches.accumulation // period) * period
        elements += crossing_elements(config, batches, taken)
        losses = losses * taken // batches.accumulation
    else:
        elements += crossing_elements(config, batches)
    passes = 1 + sum(extension.evaluations for extension in of_job(config))
    return passes * (elements * ITEMSIZE[config.precision] + losses)
