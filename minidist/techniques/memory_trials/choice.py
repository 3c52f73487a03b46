"""What runs again in backward, so that no rank holds more than its budget: as little as the trials allow.

Without a pipeline it is the first of none, selective, full and sqrt with which every rank fits. In a pipeline only
stages of ranks that do not fit run again, one more of each such rank in every trial, its first stage first: that one
keeps the activations of the most micro-batches.

Proved by: tests/commands/test_memory_budget.py
"""

from collections.abc import Callable, Sequence

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.limits import is_size
from minidist.base.read_file import read_json

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


def fit_model(trial: Trial) -> tuple[str, Rooms]:
    """Return what to recompute of a model without a pipeline, and the rooms; the best choice where none fits."""
    tried = {"none": trial("none")}
    for what in ("selective", "full", "sqrt"):
        if max(map(min, tried.values())) >= 0:
            break
        try:
            tried[what] = trial(what)
        except UsageError:
            # An MLP has no attention, and minidist does not know the blocks of a user's model.
            continue
    return max(tried.items(), key=lambda one: min(one[1]))


def fit_stages(trial: Trial, stages_of: Sequence[Sequence[int]]) -> tuple[str, Rooms]:
    """Return which stages of a pipeline run again, and the rooms. stages_of: of each rank of the pipeline."""
    again: set[int] = set()
    what, found = "none", trial("none")
    while min(found) < 0:
        each = len(found) // len(stages_of)
        over = [min(found[rank * each : (rank + 1) * each]) < 0 for rank in range(len(stages_of))]
        waiting = [sorted({*stages} - again) for stages in stages_of]
        more = {stages[0] for stages, is_over in zip(waiting, over, strict=True) if is_over and stages}
        if not more:
            break
        again |= more
        what = "stages:" + ",".join(map(str, sorted(again)))
        found = trial(what)
    return what, found
