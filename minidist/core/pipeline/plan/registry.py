"""Which file makes which schedule. A new schedule is one new file:

    @schedule("my-schedule")
    def my_schedule(p, m): ...      returns for each of the p ranks the list of its actions on m micro-batches

`p` ranks, `m` micro-batches, and, for a function that takes it, `v` chunks per rank. Further keyword arguments are
options.

Proved by: tests/pipeline/test_plans.py
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.core.base import hooks
from minidist.core.base.registry import Registry
from minidist.core.pipeline.plan.plan import Item, Plan

Orders = Sequence[Sequence[Item]]


@dataclass(frozen=True)
class Schedule:
    """A schedule by name.

    chunks: stages per rank: how many it always has, or None when the caller chooses (default 2). takes: (p, m, v, and
    the options that it names) -> None, or the end of a sentence that says which m it can take. updates: see Plan.
    complete: (plan, options) -> the plan, where options change more of it than its orders.
    """

    name: str
    function: Callable[..., Orders]
    aliases: tuple[str, ...] = ()
    chunks: int | None = 1
    takes: Callable[..., str | None] | None = None
    updates: str = "flush"
    complete: Callable[[Plan, Mapping[str, Any]], Plan] | None = None

    def plan(self, stages: int, microbatches: int, chunks: int | None = None, **options: Any) -> Plan:
        """Return the plan for `stages` pipeline ranks with `chunks` stages each.

        Raises UsageError when the schedule cannot be made.
        """
        hooks.check_schedule(self, stages, microbatches, chunks, options)
        v = self.chunks or chunks or 2
        arguments: dict[str, Any] = {"p": stages, "m": microbatches}
        if "v" in inspect.signature(self.function).parameters:
            arguments["v"] = v
        plan = Plan(self.name, self.function(**arguments, **options), stages * v, microbatches, self.updates)
        return plan if self.complete is None else self.complete(plan, options)


SCHEDULES: Registry[Schedule] = Registry("schedule", lambda: hooks.more_schedules)


def schedule(
    name: str, *, aliases: tuple[str, ...] = (), **attributes: Any
) -> Callable[[Callable[..., Orders]], Callable[..., Orders]]:
    """Register a function as the schedule `name`. attributes: those of `Schedule`."""

    def register(function: Callable[..., Orders]) -> Callable[..., Orders]:
        SCHEDULES.add(name, Schedule(name, function, aliases, **attributes), aliases)
        return function

    return register


def get_schedule(name: str) -> Schedule:
    """Return the schedule of that name or alias (in any case); UsageError with the nearest name."""
    return SCHEDULES[str(name)]
