"""The pipeline plan that a config asks for, and the stages into which it cuts the model.

The strategies run this plan, and the closed forms count its messages, so both read it here.

Proved by: tests/train/test_pipelines.py, tests/planning/test_profiler.py
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime import cut_model
from minidist.core.pipeline.schedules import SCHEDULES, Schedule
from minidist.data import load_dataset
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig, updates_of
from minidist.pipeline.runtime.refusals import check_cuts
from minidist.techniques import replayed


def load_job_plan(config: TrainConfig, microbatches: int) -> Plan:
    """Return the schedule's plan for one pipeline: for one step, or for a stream where updates are asynchronous.

    The order of actions in a stream is periodic, so the plan of a stream has just enough micro-batches for its period,
    whatever the number of steps (pipeline/runtime/stream.py). Raises UsageError when the schedule does not exist, or
    when it cannot be made for these numbers of stages and micro-batches.
    """
    from minidist.pipeline.runtime.stream import plan_length
    from minidist.pipeline.schedules import load_plan

    updates = updates_of(config.schedule)
    length = plan_length(config.pp, period_of(config, microbatches))
    # PipeDream updates the weights after every mini-batch, without draining the pipeline.
    if updates in ("stash", "vertical-sync"):
        replicas = replicas_of(config)
        options: dict[str, Any] = {"replicas": replicas} if replicas else {}
        return load_plan(config.schedule, config.pp, length, config.chunks, **options)

    # PipeDream-2BW updates once per batch of micro-batches.
    if updates == "2bw":
        return load_plan(config.schedule, config.pp, microbatches, config.chunks, batches=-(-length // microbatches))

    # A synchronous schedule drains the pipeline at the end of a step, so every step uses the same plan.
    return load_plan(config.schedule, config.pp, microbatches, config.chunks)


def period_of(config: TrainConfig, microbatches: int) -> int:
    """Return the period of an asynchronous pipeline: the number of micro-batches after which paths and shapes repeat.

    microbatches: the number per step. With 2BW all micro-batches take the same path, and some may have one row less
    than others; with the other schedules all have the same shape, and paths depend on the replicas of each stage.
    """
    if updates_of(config.schedule) == "2bw":
        return microbatches
    replicas = replicas_of(config) or [1]
    return lcm(*replicas) if min(replicas) > 0 else 1


def stream_end(config: TrainConfig, step: int) -> int:
    """Return the number of the job's steps after which the stream that contains step `step` ends.

    An asynchronous pipeline drains before a checkpoint is written or the held-out loss is computed, and at the end of
    the job.
    """
    return min([config.steps, *((step // n + 1) * n for n in (config.every, config.evaluate_every) if n)])


def streams(config: TrainConfig, first: int = 0) -> Iterator[range]:
    """Yield the steps of each stream of an asynchronous pipeline, from step `first` on."""
    while first < config.steps:
        end = stream_end(config, first)
        yield range(first, end)
        first = end


def make_plan(config: TrainConfig, microbatches: int) -> Plan:
    """Return the validated plan that the strategies run, with forwards run again where a technique asks for them."""
    again = replayed(config)
    # The rules, the closed forms and every rank ask for the same plan, so it is made once. The plan in a file may
    # change between two calls.
    schedule = SCHEDULES.get(config.schedule)
    if schedule is not None and schedule.updates == "flush":
        from minidist.pipeline.schedules.load import check_sizes

        check_sizes(config.schedule, config.pp, microbatches)
        return _plan_of_a_step(schedule, config.pp, microbatches, config.chunks, again)
    return _validated(load_job_plan(config, microbatches), again)


@lru_cache(maxsize=64)
def _plan_of_a_step(
    schedule: Schedule, stages: int, microbatches: int, chunks: int | None, again: tuple[int, ...] | range
) -> Plan:
    """Return the plan of one step of a registered schedule whose pipeline drains at the end of every step."""
    return _validated(schedule.plan(stages, microbatches, chunks), again)


def _validated(plan: Plan, again: tuple[int, ...] | range) -> Plan:
    from minidist.pipeline.passes import recompute
    from minidist.pipeline.validate import validate

    validate(plan)
    # A range has all stages that there may be, and a list those that the user has named.
    named = [stage for stage in range(plan.stages) if stage in again] if isinstance(again, range) else again
    return recompute(plan, named) if named else plan


def replicas_of(config: TrainConfig) -> list[int] | None:
    """Return the number of ranks of each stage, from --replicas or the file of --partition; None when each has one."""
    if config.replicas is None:
        from minidist.pipeline.partition import read_stages

        stages = read_stages(config.partition) or []
        return [stage.replicas for stage in stages] if any(stage.replicas > 1 for stage in stages) else None
    try:
        return [int(text) for text in config.replicas.split(",")]
    except ValueError:
        raise UsageError(f"--replicas {quoted(config.replicas)}; write the ranks of each stage, such as 2,1") from None


def cut_stages(config: TrainConfig, model: Any, stages: int) -> tuple[list[Any], list[str]]:
    """Cut the model into stages as --partition says: uniform, parameters, sizes, or a file of `minidist profile`."""
    return cut_model(model, stages, stage_sizes(config.partition, model, stages))


def cut_sizes(config: TrainConfig, model: Any, stages: int) -> list[int]:
    """Return the blocks of each stage of a model."""
    sizes, blocks = stage_sizes(config.partition, model, stages), len(model.blocks)
    check_cuts(blocks, stages, sizes)
    return chunk_sizes(blocks, stages) if sizes is None else sizes


def check_stages(config: TrainConfig, dataset: Any, stages: int) -> None:
    """Raise UsageError when the model cannot be cut into `stages` stages."""
    # Equal stages of the package's own models follow from the number of layers, so no model is built for them.
    if config.partition == "uniform" and not config.is_own_model:
        check_cuts(config.layers + (config.model == "mlp"), stages, None)
    else:
        cut_stages(config, make_model(config, dataset), stages)


def stage_sizes(partition: str, model: Any, stages: int) -> list[int] | None:
    """Return the number of blocks of each stage; None means as equal as possible.

    Raises UsageError when `partition` cannot be read, or has another number of blocks than the model.
    """
    if partition == "uniform":
        return None
    from minidist.pipeline.partition import by_cost, by_slowest, read_profile, read_stages

    # A file of `minidist partition`.
    if (decided := read_stages(partition)) is not None:
        return [stage.last - stage.first + 1 for stage in decided]

    # By cost, which is the parameters of each block or its measured milliseconds; otherwise the sizes are given.
    if partition == "parameters":
        # Cut into as many stages as blocks, the model has one module per block.
        modules, _ = cut_model(model, count_blocks(model))
        found = by_cost([sum(p.size for p in module.parameters()) for module in modules], stages)
    elif partition.partition(":")[0].endswith(".json"):
        layers = read_profile(partition)
        if len(layers) != count_blocks(model):
            raise UsageError(
                f"--partition {quoted(partition, marks=False)} has {len(layers)} layers and the model"
                f" {count_blocks(model)} blocks; measure this model: minidist profile"
            )
        # The slowest stage determines the pipeline's rate, so its time is minimised.
        found = by_slowest([layer.fwd_ms + layer.bwd_ms for layer in layers], stages)
    else:
        try:
            return [int(text) for text in partition.split(",")]
        except ValueError:
            raise UsageError(
                f"--partition {quoted(partition)}; it must be uniform, parameters, the blocks of each stage such as"
                " 3,1, or a FILE.json of minidist profile or partition"
            ) from None
    return [stage.last - stage.first + 1 for stage in found]


def count_blocks(model: Any) -> int:
    """Return the number of blocks that a pipeline can divide among its stages."""
    # GPT has its blocks in transformer.h, Llama in model.layers, an MLP in layers.
    inner: Any = getattr(model, "transformer", None) or getattr(model, "model", None) or model
    return len(inner.h if hasattr(inner, "h") else inner.layers)


def blocks_of_stages(config: TrainConfig, stages: int) -> list[range]:
    """Return the numbers of the blocks of each stage; those of the layers, for an MLP."""
    sizes = None
    if config.partition != "uniform":
        sizes = stage_sizes(config.partition, make_model(config, load_dataset(config.data)), stages)

    # An MLP has one layer more than hidden layers: the one that returns the classes.
    ends = offsets(sizes or chunk_sizes(config.layers + (config.model == "mlp"), stages))
    return [range(first, end) for first, end in pairwise(ends)]
