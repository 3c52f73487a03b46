"""What fits a memory budget: the largest micro-batch, or what runs again in backward so that each rank holds its share.

`--micro-batch auto --memory-budget BYTES` takes the largest micro-batch with which no rank holds more bytes at a time.

The micro-batches cut a rank's share of --global-batch into equal parts, or parts that differ by one sample. Their size
changes how much memory is in use at a time, and the result only by rounding:

    --global-batch 24 on two ranks     micro-batches of   12    6    4    3    2    1   samples
                                       per step and rank   1    2    3    4    6   12

They are tried from the largest to the smallest, and the first one that fits is taken. Each trial is two steps on
simulated ranks, because an optimizer has its state from the first step on, and the bytes are those of the memory
account. The arrays have no data (base/meta.py), unless the job decides by values (`settings_that_need_values`), so a
trial takes neither the memory that it counts nor the time of the computation. The peak may be smaller for a larger
micro-batch, as a pipeline then has fewer of them in flight, so no micro-batch is skipped.

A job that is resumed with the same flags finds the same micro-batch; a checkpoint records its number.

`--recompute-budget FILE` has a budget for each rank, and chooses --recompute by the same trials: see
`choice.py`.

Proved by: tests/commands/test_memory_budget.py
"""

from contextlib import nullcontext

from minidist.base.errors import UsageError, quoted_path
from minidist.base.meta import creating_meta
from minidist.comm import SimWorld
from minidist.core.comm import Comm
from minidist.job.config.pipeline_plan import make_plan
from minidist.job.config.train_config import TrainConfig, flag, resolve_batches
from minidist.job.train.start import job_size, number_of_ranks, settings_that_need_values, trial
from minidist.job.train.state import TrainResult
from minidist.job.train.trainer import train
from minidist.techniques.memory_trials.choice import fit_model, fit_stages, read_budgets, rooms


def fit_micro_batch(config: TrainConfig, ranks: int | None, has_values: bool = True) -> tuple[TrainConfig, str]:
    """Return the job with the largest micro-batch that fits its memory budget, and a line that says so.

    Raises UsageError without --memory-budget or --global-batch, with a number of micro-batches, when no micro-batch
    is possible, and when none fits.
    """
    # [1] What is divided, and by what it is limited, must be given.
    budget = config.optional("memory_budget")
    if budget is None:
        raise UsageError("--micro-batch auto needs a limit; add --memory-budget BYTES, which a rank may hold at a time")
    if config.global_batch is None:
        raise UsageError("--micro-batch auto divides --global-batch into micro-batches; add --global-batch SAMPLES")
    for name in ("accumulation", "microbatches"):
        if getattr(config, name) is not None:
            raise UsageError(
                f"--micro-batch auto chooses the number of micro-batches, and {flag(name)} {getattr(config, name)}"
                " gives it; leave one of them out"
            )

    # [2] The sizes of micro-batches: the largest share in any number of parts that leaves every rank a sample in each.
    size = job_size(config, ranks)
    whole = config.model_copy(update={"micro_batch": None, "memory_budget": None, "accumulation": 1})
    shares = [sum(rows) for rows in resolve_batches(whole, size).shares.rows]
    choices = sorted({-(-max(shares) // parts) for parts in range(1, min(shares) + 1)}, reverse=True)

    # [3] From the largest on, the first one that fits. One that the job's rules refuse is left out.
    peaks, refused = {}, None
    for micro in choices:
        chosen = config.model_copy(update={"micro_batch": micro, "memory_budget": None})
        try:
            peaks[micro] = max(_peaks(chosen, ranks, has_values))
        except UsageError as error:
            refused = refused or error
            continue
        if peaks[micro] <= budget:
            batches = resolve_batches(chosen, size)
            return chosen, (
                f"--micro-batch {micro} --accumulation {batches.accumulation}: a rank has {peaks[micro]:,} B alive at a"
                f" time, of --memory-budget {budget:,.0f}"
            )
    if not peaks:
        assert refused is not None
        raise refused
    smallest = min(peaks)
    raise UsageError(
        f"--memory-budget {budget:,.0f} B: a rank has {peaks[smallest]:,} B alive at a time even with --micro-batch"
        f" {smallest}; raise it, or use more ranks, --zero or --recompute"
    )


def fit_recompute(config: TrainConfig, ranks: int | None, has_values: bool = True) -> tuple[TrainConfig, str]:
    """Return the job that recomputes as little as its budgets need, and a line that says what.

    Raises UsageError for a file that is wrong, for a job that gives --recompute, without the technique
    `recompute`, and when nothing fits.
    """
    path = config.optional("recompute_budget")
    where, given = f"--recompute-budget {quoted_path(path, marks=False)}", config.optional("recompute")
    if given is None:
        raise UsageError(f"{where} chooses --recompute, and minidist/techniques has no folder recompute; leave it out")
    if given != "none":
        raise UsageError(f"{where} chooses --recompute, and --recompute {given} gives it; leave one of them out")
    batches = resolve_batches(config, job_size(config, ranks))
    dims, budgets = batches.dims, read_budgets(path, batches.dims.ranks, batches.dims.pp)

    def chosen(what: str) -> TrainConfig:
        return config.model_copy(update={"recompute_budget": None, "recompute": what})

    def trial_of(what: str) -> list[int]:
        return rooms(_peaks(chosen(what), ranks, has_values)[: dims.ranks], budgets)

    if dims.pp > 1:
        plan = make_plan(config, batches.accumulation)
        what, room = fit_stages(trial_of, [plan.stages_of(rank) for rank in range(dims.pp)])
    else:
        what, room = fit_model(trial_of)

    # The rank with the least room.
    rank = min(range(len(room)), key=room.__getitem__)
    one = "rank" if len(room) == dims.ranks else "pipeline rank"
    held = f"{one} {rank} has {int(budgets[rank]) - room[rank]:,} B alive at a time"
    if room[rank] >= 0:
        return chosen(what), f"--recompute {what}: {held}, of {budgets[rank]:,.0f} in {where}"
    raise UsageError(
        f"{where}: {held} even with --recompute {what}, of {budgets[rank]:,.0f}; raise it, or use more ranks, --zero or"
        " a smaller --micro-batch"
    )


def _peaks(config: TrainConfig, ranks: int | None, has_values: bool) -> list[int]:
    """Return the most bytes of each rank in two steps of a job. Raises UsageError when its rules refuse it."""
    once = trial(config.model_copy(update={"init_from": None}), 2)
    real = settings_that_need_values(once) or once.is_own_model

    def main(comm: Comm) -> TrainResult:
        with nullcontext() if real else creating_meta():
            return train(comm, once)

    with nullcontext() if has_values else creating_meta():  # because the rules may build the model
        size = number_of_ranks(once, ranks, has_values)
    results: list[TrainResult] = SimWorld(size, record=False, checks=False).run(main)
    return [result.peak_bytes for result in results]
