"""`--check-layouts`: for each operation, whether the --tp ranks hold its result whole, as shards or as partial sums.

A rank sends per step: nothing.
Equal to: the job without the check, bit for bit.

Proved by: tests/parallel/test_layout_check.py
"""

from contextlib import AbstractContextManager
from typing import Any

from minidist.base.watchers import watching
from minidist.parallel.layout_check import INVARIANT, VARYING, LayoutChecker
from minidist.techniques import Extension, Field, Record, without_effect


class LayoutCheck(Extension):
    """Types of all results on the tape; see `LayoutChecker`."""

    class Settings(Record):
        check_layouts: bool = Field(
            False,
            description="check what the tensor-parallel ranks hold of every result: the same values, parts or summands",
        )

    observes = True
    rules = (without_effect("check_layouts", lambda j: j.tp > 1, "--tp 2 or more", switch=True),)

    def attached(self, strategy: Any) -> AbstractContextManager[Any]:
        # What enters a stage from outside is whole, or this rank's rows.
        boundary = VARYING if strategy.job.config.sequence_parallel else INVARIANT
        self.checker = LayoutChecker(strategy.axes.tp, "tp", boundary)
        return watching(self.checker)

    def before_step(self, samples: int) -> None:
        self.checker.begin_step()

    def result(self) -> dict[str, Any]:
        return {"layouts_checked": self.checker.checked}

    def lines(self, result: dict[str, Any]) -> list[str]:
        return [f"types of {result['layouts_checked']:,} results over the tensor axis are right"]
