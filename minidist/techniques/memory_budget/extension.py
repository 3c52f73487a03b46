"""`--memory-budget-file FILE`: the micro-batch is chosen again whenever the memory that a rank may use changes.

    budget       |▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔|              |▔▔▔▔▔▔▔▔▔▔▔     FILE, read by every rank between two steps
                 |                   |▔▔▔▔▔▔▔▔▔▔▔▔▔▔|
    micro-batch  |  8   8   8   8   8|  2   2   2   |  8   8   8     the largest that fits on every rank
    per step     |  1 of 8 samples   |  4 of 2      |                the same samples, the same update

[1] Every rank reads its budget, and tells all others the budget, the bytes that it holds between two steps, and by
how much the last step rose above those (24 B to each, purpose memory_budget). [2] From the largest micro-batch on, the
first one that fits on every rank is taken: what a step adds is known where that size has run, and is in proportion to
the rows of the last size otherwise. [3] A pipeline gets the plan for the new number of micro-batches; weights,
gradients and optimizer state stay where they are.

The bytes are those of the memory account (base/memory.py). The global batch stays, so a step is that of another cut of
the same batch: equal up to rounding, and `minidist compare` tells one device the cuts. When nothing fits, the smallest
micro-batch trains on, and one line says so; so does a file that holds no number.

A rank sends per step: 24 (P-1) B on P ranks.
Equal to: one device that is told the size of the micro-batches, bit for bit.
Lesson: 10b_batch_size_and_noise.

Proved by: tests/techniques/test_memory_budget_file.py
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from minidist.base.errors import MinidistError, UsageError, quoted, quoted_path, reason
from minidist.base.memory import MemoryAccount
from minidist.base.watchers import current
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.data import cut_batch, measured_every
from minidist.data.batch_plan import BatchPlan
from minidist.techniques import Extension, Field, Record, Rule, Run

new_purpose("memory_budget")

NUMBERS = 3  # float64 that a rank tells every other one: its budget, what it holds, what a step adds


class BudgetState(Record, strict=True):
    """What `MemoryBudget.state` returns. added: each size of the micro-batch, and what a step added on each rank."""

    micro_batch: int = Field(ge=1)
    added: list[list[Annotated[float, Field(allow_inf_nan=False)]]]


class CutPlan(BatchPlan):
    """The same samples in every step; how they are cut may change."""

    changes = True


class MemoryBudget(Extension):
    """Chooses the micro-batches of the next step. used: each size of the micro-batch, and for how many steps."""

    class Settings(Record):
        memory_budget_file: str | None = Field(
            None,
            description=(
                "a file with the bytes that a rank may hold at a time, read between two steps: the micro-batch follows;"
                " {rank} in the name is the rank's number"
            ),
        )

    panel = "Batch"
    rules = (
        Rule(
            "memory-budget-file-with-batches-ahead",
            lambda j: j.memory_budget_file and (j.optional("prefetch_batches") or j.optional("loader_workers")),
            "--prefetch-batches and --loader-workers read the micro-batches of later steps, whose size"
            " --memory-budget-file has not chosen yet",
        ),
        Rule(
            "memory-budget-file-with-adaptive-batch",
            lambda j: j.memory_budget_file and j.optional("adaptive_batch") is not None,
            "--adaptive-batch {adaptive_batch} and --memory-budget-file both choose the number of micro-batches",
            "leave one of them out",
        ),
        Rule(
            "memory-budget-file-with-measured-weights",
            lambda j: j.memory_budget_file and measured_every(j.weights),
            "not implemented: --weights {weights} chooses each rank's rows of the next steps, and --memory-budget-file"
            " how they are cut",
            "use fixed --weights, such as 2,1, or leave one of them out",
        ),
        Rule(
            "memory-budget-file-without-steps-in-common",
            lambda j: j.memory_budget_file and (j.server or j.asynchronous or j.optional("local_steps")),
            "--memory-budget-file chooses micro-batches with all ranks between two steps, and in this job ranks do not"
            " end their steps together",
            "leave out --strategy ps, --local-steps or the asynchronous --schedule",
        ),
        Rule(
            "memory-budget-file-with-teacher-ranks",
            lambda j: j.memory_budget_file and j.optional("teacher_ranks"),
            "--teacher-ranks {teacher_ranks} computes the logits of later steps, whose micro-batches"
            " --memory-budget-file has not chosen yet",
        ),
    )
    observes = True  # the reference on one device is told the cuts
    key = "memory_budget"
    saved: BudgetState | None = None  # of the checkpoint, until the first step

    @classmethod
    def check(cls, job: Any) -> None:
        path = job.memory_budget_file.replace("{rank}", "0")
        budget = read_budget(path)
        if isinstance(budget, str):
            raise UsageError(
                f"--memory-budget-file {quoted_path(path)}: {budget}; write the bytes that a rank may hold at a"
                " time, such as 2e9"
            )

    @classmethod
    def changes_batches(cls, config: Any) -> bool:
        return config.memory_budget_file is not None

    def build(self, job: Any, comm: Comm | None) -> None:
        assert comm is not None  # the reference leaves the technique out
        self.comm = comm
        self.path = self.settings.memory_budget_file.replace("{rank}", str(comm.rank))
        self.budget, self.said = float("inf"), ""
        self.added: dict[int, np.ndarray] = {}  # size of the micro-batch -> what a step added on each rank
        self.used: list[tuple[int, int]] = []
        job.plan = CutPlan(job.config, job.batches)

    def load(self, state: Any, samples: int) -> None:
        if state is not None:
            self.saved = BudgetState.model_validate(state)

    def begin(self, comm: Comm, strategy: Any, done: int) -> None:
        """Let a resumed job begin with the micro-batch of its checkpoint, where its layout can have that."""
        if self.saved is not None and self.saved.micro_batch != strategy.job.batches.micro_batch:
            for after in choices(strategy.job.batches):
                if after.micro_batch == self.saved.micro_batch:
                    _cut(strategy, after)

    def attached(self, strategy: Any) -> None:
        # What a step adds depends on the layout. That of the checkpoint is taken to be the same, on as many ranks.
        rows = [] if self.saved is None else self.saved.added
        self.added = {int(row[0]): np.array(row[1:]) for row in rows if len(row) == 1 + self.comm.size}
        self.strategy, self.saved = strategy, None

    def state(self) -> dict[str, Any]:
        added = [[micro, *each.tolist()] for micro, each in self.added.items()]
        return {"micro_batch": self.strategy.job.batches.micro_batch, "added": added}

    def before_step(self, samples: int) -> None:
        # A new peak, so that it is that of this step; `next_layout` gives the account its old one back.
        account = current(MemoryAccount)
        assert account is not None
        self.held, self.earlier = account.current, account.begin_peak()

    def next_layout(self, strategy: Any, done: int, rebuild: Callable[[Any], Any]) -> Any:
        """Give the next step the largest micro-batches that fit the budget of every rank; the layout is the same."""
        batches = strategy.job.batches
        account, micro = current(MemoryAccount), batches.micro_batch
        assert account is not None
        rise = account.peak - self.held
        if self.earlier[0] > account.peak:
            account.peak, account.at_peak = self.earlier
        if self.used and self.used[-1][0] == micro:
            self.used[-1] = micro, self.used[-1][1] + 1
        else:
            self.used.append((micro, 1))

        # [1] What every rank may hold, holds, and adds in a step.
        mine = np.array([self._read(), account.current, rise], np.float64)
        with purpose("memory_budget"):
            budgets, held, self.added[micro] = all_gather(self.comm, mine).reshape(-1, NUMBERS).T
        if done == strategy.job.config.steps:
            return strategy

        # [2] The largest size that fits; all ranks have the same numbers. [3] A pipeline may have no plan for it.
        for after in choices(batches):
            needed = held + self._adds(after.micro_batch, micro)
            if (needed <= budgets).all() and (after.micro_batch == micro or _cut(strategy, after)):
                self.said = "" if self.said.startswith("a rank") else self.said
                return strategy
        self._nothing_fits(strategy, done, budgets, held, micro)
        return strategy

    def _adds(self, micro: int, last: int) -> Any:
        """Return what a step with a size of the micro-batch adds on each rank; last: the size that has just run."""
        return self.added.get(micro, self.added[last] * (micro / last))

    def _read(self) -> float:
        """Return this rank's budget; that of the step before where the file holds no number."""
        budget = read_budget(self.path)
        if isinstance(budget, str):
            self._say(f"rank {self.comm.rank}: {quoted_path(self.path)} {budget}; the last budget stays")
        else:
            self.budget = budget
        return self.budget

    def _nothing_fits(self, strategy: Any, done: int, budgets: np.ndarray, held: np.ndarray, last: int) -> None:
        """Train on with the smallest micro-batch that the layout can have, and say so once."""
        for after in reversed(list(choices(strategy.job.batches))):
            if after.micro_batch == strategy.job.batches.micro_batch or _cut(strategy, after):
                break
        micro = strategy.job.batches.micro_batch
        needed = held + self._adds(micro, last)
        rank = int((needed - budgets).argmax())
        if self.comm.rank == 0:
            self._say(
                f"a rank has a budget that no micro-batch fits, after step {done - 1}: rank {rank} may hold"
                f" {budgets[rank]:,.0f} B and needs {needed[rank]:,.0f} B; training goes on with --micro-batch {micro}"
            )

    def _say(self, line: str) -> None:
        if line.partition(",")[0] != self.said.partition(",")[0]:
            print(f"minidist: {line}", file=sys.stderr, flush=True)
        self.said = line

    def record(self, job: Any, done: int) -> dict[str, Any]:
        return {"micro_batch": job.batches.micro_batch}

    def result(self) -> dict[str, Any]:
        return {"micro_batches": self.used}

    def lines(self, result: dict[str, Any]) -> list[str]:
        used = (f"{micro} for {steps:,} step{'s' * (steps != 1)}" for micro, steps in result["micro_batches"])
        return [f"micro-batch: {', then '.join(used)}"]

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """The numbers of each rank to all others, after every step."""
        return {"memory_budget": run.steps * run.ranks * (run.ranks - 1) * NUMBERS * 8}


def read_budget(path: str) -> float | str:
    """Return the bytes in a file; where it cannot be read, or holds no number above 0, what is wrong with it."""
    text = None
    try:
        text = Path(path).read_text(encoding="utf-8")
        if float(text) > 0:
            return float(text)
    except (OSError, ValueError) as error:
        if text is None:
            return f"cannot be read ({reason(error)})"
    return f"holds {quoted(text.strip())}, which is no number above 0"


def choices(batches: Any) -> Iterator[Any]:
    """Yield the `Batches` that cut the same samples in other ways, from the largest micro-batch on."""
    shares, seen = cut_batch(batches.global_batch, batches.dp, 1, batches.weights), set()
    for accumulation in range(1, min(map(sum, shares.rows)) + 1):
        largest = cut_batch(batches.global_batch, batches.dp, accumulation, batches.weights).largest
        if largest not in seen:
            seen.add(largest)
            yield replace(batches, micro_batch=largest, accumulation=accumulation)


def _cut(strategy: Any, batches: Any) -> bool:
    """Cut the next steps in this way; False, on every rank, where the schedule has no plan for it."""
    try:
        strategy.cut_batches(batches)
    except MinidistError:
        return False
    return True
