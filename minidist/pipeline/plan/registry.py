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

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.registry import Registry
from minidist.pipeline.plan.action import Item
from minidist.pipeline.plan.plan import Plan

Orders = Sequence[Sequence[Item]]
MAX_FORWARDS = 1_000_000  # of a plan; a second or two on one core for each hundred thousand


@dataclass(frozen=True)
class Schedule:
    """A schedule by name.

    chunks: stages per rank: how many it always has, or None when the caller chooses (default 2). takes: (p, m, v, and
    the options that it names) -> None, or the end of a sentence that says which m it can take. updates: see Plan.
    copies: of every stage, on different ranks. complete: (plan, options) -> the plan, where options change more of it
    than its orders.
    """

    name: str
    function: Callable[..., Orders]
    aliases: tuple[str, ...] = ()
    chunks: int | None = 1
    takes: Callable[..., str | None] | None = None
    updates: str = "flush"
    copies: int = 1
    complete: Callable[[Plan, Mapping[str, Any]], Plan] | None = None

    def about(self) -> str:
        """Return the first line of its file."""
        return (inspect.getdoc(inspect.getmodule(self.function)) or "").partition("\n")[0]

    def plan(self, stages: int, microbatches: int, chunks: int | None = None, **options: Any) -> Plan:
        """Return the plan for `stages` pipeline ranks with `chunks` stages each.

        Raises UsageError when the schedule cannot be made.
        """
        v = self._chunks_per_rank(stages, microbatches, chunks)
        known = inspect.signature(self.function).parameters
        self._check_options(known, options)

        judged = inspect.signature(self.takes).parameters if self.takes else {}
        given = {option: value for option, value in options.items() if option in judged}
        problem = self.takes(stages, microbatches, v, **given) if self.takes else None
        if problem:
            raise UsageError(
                f"schedule {quoted(self.name)} on {stages} stages cannot take {microbatches} micro-batches: {problem}"
            )
        arguments: dict[str, Any] = {"p": stages, "m": microbatches, **({"v": v} if "v" in known else {})}
        orders = self.function(**arguments, **options)

        plan = Plan(self.name, orders, stages * v, microbatches, self.updates)
        return plan if self.complete is None else self.complete(plan, options)

    def _chunks_per_rank(self, stages: int, microbatches: int, chunks: int | None) -> int:
        """Return how many stages each rank has; UsageError for sizes that the schedule cannot have."""
        for name, value in (("--stages", stages), ("--microbatches", microbatches), ("--chunks", chunks)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        if self.chunks is not None and chunks not in (None, self.chunks):
            raise UsageError(
                f"schedule {quoted(self.name)} has {self.chunks} chunk{'s' if self.chunks > 1 else ''} per rank, not"
                f" {chunks}; leave --chunks out, or take interleaved or looped-bfs"
            )
        v = self.chunks or chunks or 2
        if stages * v * microbatches > MAX_FORWARDS:
            raise UsageError(
                f"{quoted(stages)} ranks x {quoted(v)} chunks x {quoted(microbatches)} micro-batches do not fit in"
                f" memory; a plan has at most {MAX_FORWARDS:,} forwards"
            )
        return v

    def _check_options(self, known: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
        """Raise UsageError unless options are the function's further arguments, of the types of their defaults."""
        for option, value in options.items():
            if option in ("p", "m", "v") or option not in known:
                allowed = [name for name in known if name not in ("p", "m", "v")]
                raise UsageError(
                    f"schedule {quoted(self.name)} has no option {quoted(option)}{nearest(option, allowed)}; it has"
                    f" {', '.join(allowed) or 'none'}"
                )
            kind = type(known[option].default)
            if kind in (bool, int) and not isinstance(value, int):
                raise UsageError(
                    f"{option}={quoted(value)} of schedule {quoted(self.name)}; it must be"
                    f" {'true or false' if kind is bool else 'a whole number'}"
                )


SCHEDULES: Registry[Schedule] = Registry("schedule")


def schedule(
    name: str, *, aliases: tuple[str, ...] = (), **attributes: Any
) -> Callable[[Callable[..., Orders]], Callable[..., Orders]]:
    """Register a function as the schedule `name`. attributes: those of `Schedule`."""

    def register(function: Callable[..., Orders]) -> Callable[..., Orders]:
        SCHEDULES.add(name, Schedule(name, function, aliases, **attributes), aliases)
        return function

    return register


def schedules() -> dict[str, Schedule]:
    """Return the schedules of all files that were imported by name, sorted."""
    return dict(sorted(SCHEDULES.items()))


def get_schedule(name: str) -> Schedule:
    """Return the schedule of that name or alias (in any case); UsageError with the nearest name."""
    return SCHEDULES[name]
