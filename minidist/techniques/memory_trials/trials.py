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

`--recompute-budget FILE` has a budget for each rank, and chooses --recompute by the same trials. As little runs again
as they allow: without a pipeline it is the first of none, selective, full and sqrt with which every rank fits. In a
pipeline only stages of ranks that do not fit run again, one more of each such rank in every trial, its first stage
first: that one keeps the activations of the most micro-batches.

Proved by: tests/commands/test_memory_budget.py
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.limits import is_size
from minidist.base.meta import creating_meta
from minidist.base.read_file import read_json
from minidist.comm import SimWorld
from minidist.core.comm import Comm
from minidist.job.config.pipeline_plan import make_plan
from minidist.job.config.train_config import TrainConfig, flag, resolve_batches
from minidist.job.train.start import job_size, number_of_ranks, settings_that_need_values, trial
from minidist.job.train.state import TrainResult
from minidist.job.train.trainer import train


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


# --- the budgets of --recompute-budget --------------------------------------------------------------------------------

Rooms = list[int]  # by how many bytes each budget is larger than what its ranks hold; negative where it is smaller
Trial = Callable[[str], Rooms]  # of a --recompute; UsageError for one that the job cannot have


def read_budgets(path: str, ranks: int, stages: int) -> list[float]:
    """Return the budgets of a file, one for each of `ranks`, or one for each of the `stages` ranks of a pipeline."""
    found = read_json(path, "the file of --recompute-budget", "give a JSON list of bytes")
    where = f"--recompute-budget {quoted_path(path)}"
    if not isinstance(found, list) or len(found) not in (ranks, stages):
        given = f"a list of {len(found)}" if isinstance(found, list) else quoted(found)
        either = f"{ranks}, one for each rank" + f", or {stages}, one for each rank of the pipeline" * (stages > 1)
        raise UsageError(f"{where} is {given}; it must be a list of {either}")
    for rank, budget in enumerate(found):
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not (is_size(budget) and budget > 0):
            raise UsageError(f"{where}: budget {rank} is {quoted(budget)}; it must be a number of bytes above 0")
    return found


def rooms(peaks: Sequence[int], budgets: Sequence[float]) -> Rooms:
    """Return the room of each budget: equally many ranks, one after the other, have the same one."""
    each = len(peaks) // len(budgets)
    return [int(budget) - max(peaks[i * each : (i + 1) * each]) for i, budget in enumerate(budgets)]


def fit_model(try_out: Trial) -> tuple[str, Rooms]:
    """Return what to recompute of a model without a pipeline, and the rooms; the best choice where none fits."""
    tried = {"none": try_out("none")}
    for what in ("selective", "full", "sqrt"):
        if max(map(min, tried.values())) >= 0:
            break
        try:
            tried[what] = try_out(what)
        except UsageError:
            # An MLP has no attention, and minidist does not know the blocks of a user's model.
            continue
    return max(tried.items(), key=lambda one: min(one[1]))


def fit_stages(try_out: Trial, stages_of: Sequence[Sequence[int]]) -> tuple[str, Rooms]:
    """Return which stages of a pipeline run again, and the rooms. stages_of: of each rank of the pipeline."""
    again: set[int] = set()
    what, found = "none", try_out("none")
    while min(found) < 0:
        each = len(found) // len(stages_of)
        over = [min(found[rank * each : (rank + 1) * each]) < 0 for rank in range(len(stages_of))]
        waiting = [sorted({*stages} - again) for stages in stages_of]
        more = {stages[0] for stages, is_over in zip(waiting, over, strict=True) if is_over and stages}
        if not more:
            break
        again |= more
        what = "stages:" + ",".join(map(str, sorted(again)))
        found = try_out(what)
    return what, found
