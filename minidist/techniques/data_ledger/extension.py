"""`--check-data`: after every step all ranks together must have read the next samples of the epoch; see `ledger.py`.

A rank sends per step: 40 (P-1) B per step on P ranks.
Equal to: one device, bit for bit.
Lesson: 28b_each_sample_once.

Proved by: tests/techniques/test_data_ledger.py
"""

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np

from minidist.core.comm import Comm
from minidist.techniques import Extension, Field, Moment, Record, Run
from minidist.techniques.data_ledger.ledger import ROW, DataLedger


class LedgerState(Record, strict=True):
    """What `DataLedger.state` returns, read back from a checkpoint."""

    done: int = Field(ge=0, le=2**62)
    open_epoch: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class DataCheck(Extension):
    """Holds every rank's reads to the list of the epochs' samples; see `DataLedger`."""

    class Settings(Record):
        check_data: bool = Field(
            False, description="after every step, check that all ranks together read each sample once per epoch"
        )

    observes = True
    unlike = "the samples of --check-data"
    key = "data_ledger"
    ledger: DataLedger

    def build(self, job: Any, comm: Comm | None) -> None:
        self.ledger = DataLedger(job.sampler.samples, job.config.seed, job.sampler.dataset.block)

    def before_step(self, samples: int) -> None:
        self.ledger.expect(samples)

    def read(self, numbers: np.ndarray[Any, Any], sides: Iterable[str]) -> None:
        self.ledger.record(numbers, sides)

    def after_update(self, moment: Moment) -> None:
        # While batches of later steps are on their way, what was read belongs to no step.
        copy = 0 if moment.strategy is None else moment.strategy.data_copy()
        if copy is not None:
            assert moment.comm is not None  # the reference leaves it out
            self.ledger.check(moment.comm, copy, moment.place)

    def state(self) -> dict[str, Any]:
        return self.ledger.state()

    def load(self, state: dict[str, Any] | None, samples: int) -> None:
        # Without a ledger, a checkpoint says how many samples were read, and not which.
        self.ledger.load({"done": samples} if state is None else LedgerState.model_validate(state).model_dump())

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """A row from each rank to every other, for each check."""
        return {"data_check": run.moments * run.ranks * (run.ranks - 1) * ROW}
