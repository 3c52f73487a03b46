"""A schedule that says which numbers of micro-batches it takes, and what options change in its plan beyond the orders.

Proved by: tests/pipeline/test_plans.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minidist.core.pipeline import schedules
from minidist.core.pipeline.plan import Orders, Plan


@dataclass(frozen=True)
class Schedule(schedules.Schedule):
    """A schedule by name.

    takes: (p, m, v, and the options that it names) -> None, or the end of a sentence that says which m it takes.
    complete: (plan, options) -> the plan, where options change more of it than its orders. For the others see the
    core's `Schedule`.
    """

    takes: Callable[..., str | None] | None = None
    complete: Callable[[Plan, Mapping[str, Any]], Plan] | None = None

    def plan(self, stages: int, microbatches: int, chunks: int | None = None, **options: Any) -> Plan:
        """Return the plan for `stages` pipeline ranks with `chunks` stages each; UsageError where there is none."""
        plan = super().plan(stages, microbatches, chunks, **options)
        return plan if self.complete is None else self.complete(plan, options)


def schedule(
    name: str, *, aliases: tuple[str, ...] = (), **attributes: Any
) -> Callable[[Callable[..., Orders]], Callable[..., Orders]]:
    """Register a function as the schedule `name`. attributes: those of `Schedule`."""

    def register(function: Callable[..., Orders]) -> Callable[..., Orders]:
        schedules.SCHEDULES.add(name, Schedule(name, function, **attributes), aliases)
        return function

    return register
