"""The batch of every step: who computes which of its rows, and how many rows there are.

A batch is cut into the shares of the ranks, and these into micro-batches:

    8 rows on 3 ranks          | 0 1 2 | 3 4 5 | 6 7 |              equal weights: 3, 3 and 2 rows
    weights 2,1,1              | 0 1 2 3 | 4 5 | 6 7 |              in proportion to the speeds of the ranks
    2 micro-batches per rank   | 0 1 · 2 | 3 4 · 5 | 6 · 7 |        sizes differ by at most one row

A rank's gradient is a sum over its rows, divided by the rows of the whole batch. So the sum over ranks is the gradient
of the batch whatever the shares are. A mean of the ranks' means is not: it counts the rows of a small share more.

In a job of fixed batches every step is like the first. A technique that lets batches change while the job trains
gives the job another plan; every rank takes the same decision from the same numbers, and
`compare` tells one device the same batches.

Proved by: tests/train/test_shares.py, tests/config/test_train_config.py, tests/techniques/test_batch_plan.py
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import check_size, whole_number
from minidist.core.base.layout import chunk_sizes
from minidist.data.sampler import GlobalBatchSampler, microbatch_numbers, weighted_shards

MAX_SHOWN = 16  # replicas, and samples of one, that are listed


@dataclass(frozen=True)
class Shares:
    """The rows of every micro-batch of a step. rows: [replica][i] -> rows of its i-th micro-batch."""

    rows: tuple[tuple[int, ...], ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(rows for replica in self.rows for rows in replica))

    @property
    def samples(self) -> int:
        """The rows of the whole batch."""
        return self._ends[-1]

    @property
    def accumulation(self) -> int:
        """Micro-batches of each replica."""
        return len(self.rows[0])

    @cached_property
    def largest(self) -> int:
        """Rows of the largest micro-batch."""
        return max(map(max, self.rows))

    @cached_property
    def sizes(self) -> Counter[int]:
        """How many micro-batches have this many rows."""
        return Counter(rows for replica in self.rows for rows in replica)

    @cached_property
    def is_even(self) -> bool:
        """Whether all micro-batches have the same number of rows."""
        return self.largest == min(map(min, self.rows))

    def place(self, number: int) -> tuple[int, int]:
        """Return (first row, rows) of a micro-batch; the i-th of replica r has the number r * accumulation + i."""
        replica, i = divmod(number, self.accumulation)
        rows = self.rows[replica][i]
        return self._ends[number] - rows, rows


@lru_cache(maxsize=256)
def cut_batch(samples: int, replicas: int, accumulation: int, weights: tuple[float, ...] | None = None) -> Shares:
    """Return the shares of `samples` rows, in proportion to the weights (None: equal ones), in micro-batches.

    Raises UsageError when there is not one weight per replica, and when a micro-batch would have no row.
    """
    if weights is not None and len(weights) != replicas:
        raise UsageError(
            f"--weights has {len(weights)} numbers and there are {replicas} data-parallel ranks; give one for each"
        )
    counts = [rows for _, rows in weighted_shards(samples, weights)] if weights else chunk_sizes(samples, replicas)
    smallest = min(counts)
    if smallest < accumulation:
        raise UsageError(
            f"{samples} rows on {replicas} data-parallel ranks leave {smallest} for rank {counts.index(smallest)}, and"
            f" it needs {accumulation}, one for each of its micro-batches; use --global-batch"
            f" {replicas * accumulation} or more" + (", or weights that differ less" if weights else "")
        )
    return Shares(tuple(tuple(chunk_sizes(count, accumulation)) for count in counts))


def parse_weights(text: str) -> tuple[float, ...]:
    """Return the numbers of `--weights 2,1,1`; UsageError for a text that is none."""
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(
            f"--weights {quoted(text)}; write a number above 0 for each data-parallel rank, as in 2,1,1"
        ) from None
    for rank, weight in enumerate(weights):
        check_size(weight, f"--weights {quoted(text)}: that of data-parallel rank {rank}", zero=False)
    return weights


def measured_every(weights: str | None) -> int:
    """Return K of `--weights measured:K`; 0 for other weights. Raises UsageError for another text after the colon."""
    word, _, number = (weights or "").partition(":")
    if word != "measured":
        return 0
    steps = whole_number(number) or 0
    if steps < 1:
        raise UsageError(f"--weights {quoted(weights or '')}; write the steps between two exchanges, as in measured:10")
    return steps


def sharding_rule(sampler: GlobalBatchSampler, shares: Shares, step: int = 0) -> str:
    """Return, as text, the rule that assigns samples to replicas, and the samples of one step."""
    total, batch = sampler.samples, sampler.global_batch
    replicas, accumulation = len(shares.rows), shares.accumulation
    each = f"{accumulation - 1} of {shares.largest} rows each; in step {step}:"
    if not shares.is_even:
        each = f"{accumulation - 1}, of at most {shares.largest} rows; in step {step}:"
    lines = [
        (
            f"data {sampler.dataset.name}: {total:,} samples; a step takes {batch}, so an epoch is {total / batch:,.1f}"
            " steps, and each epoch has another order"
        ),
        (
            f"step s takes places {batch} s to {batch} s + {batch - 1} of all epochs laid end to end (seed"
            f" {sampler.seed}), on any number of ranks"
        ),
        f"replica r of {replicas} takes micro-batches r x {accumulation} to r x {accumulation} + {each}",
    ]
    # A replica's micro-batches lie side by side, so its samples are one range of the global batch.
    indices = sampler.sample_indices(step)
    for replica in range(min(replicas, MAX_SHOWN)):
        numbers = microbatch_numbers(replica, accumulation)
        first, _ = shares.place(numbers.start)
        rows = slice(first, first + sum(shares.rows[replica]))
        listed = " ".join(map(str, indices[rows][:MAX_SHOWN])) + (" ..." if rows.stop - rows.start > MAX_SHOWN else "")
        lines.append(
            f"  replica {replica}: micro-batches {numbers.start} to {numbers.stop - 1}, rows {rows.start} to"
            f" {rows.stop - 1}: samples {listed}"
        )
    if replicas > MAX_SHOWN:
        lines.append(f"  and {replicas - MAX_SHOWN} more")
    return "\n".join(lines)


# --- the batch of a step ----------------------------------------------------------------------------------------------


class StepBatch(NamedTuple):
    """What a step trains on.

    start: samples of all steps before it; None: as many steps as it, of as many samples.
    """

    shares: Shares
    start: int | None = None


class BatchPlan:
    """Chooses the batch of each step: here, always the same. A subclass may change it, and set `changes`.

    config: the `TrainConfig` of the job. batches: its `Batches`, which has the size of the first batch and its cut.
    """

    changes = False

    def __init__(self, config: Any, batches: Any) -> None:
        self.config, self.batches, self.weights = config, batches, batches.weights
        self.runs: list[tuple[Shares, int]] = []  # what was trained on, and for how many steps, for the closed forms

    def next(self) -> StepBatch:
        """Return the batch of the next step."""
        return StepBatch(self.cut(self.batches.global_batch, self.batches.accumulation))

    def cut(self, samples: int, accumulation: int) -> Shares:
        """Return each replica's share of the next batch, and note that it is trained on."""
        shares = cut_batch(samples, self.batches.dp, accumulation, self.weights)
        if self.runs and self.runs[-1][0] == shares:
            self.runs[-1] = shares, self.runs[-1][1] + 1
        else:
            self.runs.append((shares, 1))
        return shares

    def samples_of(self, steps: int) -> int:
        """Return the samples of the first `steps` steps, which are done."""
        return int(steps * self.batches.global_batch)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as values of JSON."""
        return {}

    def load(self, state: dict[str, Any], steps: int) -> None:
        """Continue with the `state` of a checkpoint after `steps` steps. A ValueError says what is wrong with it."""


class ToldPlan(BatchPlan):
    """The batches of another run, one after the other: what one device is told."""

    def __init__(self, config: Any, batches: Any, told: Iterable[StepBatch]) -> None:
        super().__init__(config, batches)
        self.told = iter(told)

    def next(self) -> StepBatch:
        """Return the batch of the next step."""
        return next(self.told)
