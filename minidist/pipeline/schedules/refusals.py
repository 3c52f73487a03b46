"""What a schedule refuses: sizes that it cannot have, and options that it does not know.

Proved by: tests/pipeline/test_plans.py, tests/commands/test_schedule.py
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.core.pipeline.schedules import Schedule

MAX_FORWARDS = 1_000_000  # of a plan; a second or two on one core for each hundred thousand


def check_schedule(
    schedule: Schedule, stages: int, microbatches: int, chunks: int | None, options: Mapping[str, Any]
) -> None:
    """Raise UsageError unless a schedule can have these ranks, micro-batches and chunks, and knows the options."""
    _check_sizes(schedule, stages, microbatches, chunks)
    _check_options(schedule, options)
    takes = TAKES.get(schedule.name, getattr(schedule, "takes", None))
    if takes is None:
        return
    judged = inspect.signature(takes).parameters
    given = {option: value for option, value in options.items() if option in judged}
    problem = takes(stages, microbatches, schedule.chunks or chunks or 2, **given)
    if problem:
        raise UsageError(
            f"schedule {quoted(schedule.name)} on {stages} stages cannot take {microbatches} micro-batches: {problem}"
        )


def _check_sizes(schedule: Schedule, stages: int, microbatches: int, chunks: int | None) -> None:
    """Raise UsageError for sizes below 1, chunks that the schedule cannot have, and plans that are too large."""
    for name, value in (("--stages", stages), ("--microbatches", microbatches), ("--chunks", chunks)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    if schedule.chunks is not None and chunks not in (None, schedule.chunks):
        has = f"{schedule.chunks} chunk{'s' if schedule.chunks > 1 else ''} per rank"
        raise UsageError(
            f"schedule {quoted(schedule.name)} has {has}, not {chunks}; leave --chunks out, or take interleaved or"
            " looped-bfs"
        )
    v = schedule.chunks or chunks or 2
    if stages * v * microbatches > MAX_FORWARDS:
        raise UsageError(
            f"{quoted(stages)} ranks x {quoted(v)} chunks x {quoted(microbatches)} micro-batches do not fit in"
            f" memory; a plan has at most {MAX_FORWARDS:,} forwards"
        )


def _check_options(schedule: Schedule, options: Mapping[str, Any]) -> None:
    """Raise UsageError unless options are the function's further arguments, of the types of their defaults."""
    known = inspect.signature(schedule.function).parameters
    for option, value in options.items():
        if option in ("p", "m", "v") or option not in known:
            allowed = [name for name in known if name not in ("p", "m", "v")]
            raise UsageError(
                f"schedule {quoted(schedule.name)} has no option {quoted(option)}{nearest(option, allowed)}; it has"
                f" {', '.join(allowed) or 'none'}"
            )
        kind = type(known[option].default)
        if kind in (bool, int) and not isinstance(value, int):
            raise UsageError(
                f"{option}={quoted(value)} of schedule {quoted(schedule.name)}; it must be"
                f" {'true or false' if kind is bool else 'a whole number'}"
            )
        if option == "backward_order" and value not in ("reversed", "forward"):
            raise UsageError(f"backward_order={quoted(value)}; it must be 'reversed' or 'forward'")


# --- which numbers of micro-batches the schedules of the core can take ---


def _rounds(p: int, m: int) -> int:
    """Return the number of groups that torch makes."""
    return max(1, m // p)


def _groups(p: int, m: int, v: int, group: int = 0) -> str | None:
    """Return why m micro-batches cannot go in groups of `group`; None when they can."""
    if group == 0:
        rounds = _rounds(p, m)
        if m % rounds == 0:
            return None
        below = m // rounds * rounds
        above = next(n for n in range(m + 1, m + p + 1) if n % _rounds(p, n) == 0)  # a multiple of p at the latest
        return f"they do not make {rounds} equal groups; take {below} or {above}, or the option group=SIZE"
    if not p <= group <= m:
        return f"a group has at least {p} of them, one per rank, and at most {max(m, p)}, not {group}"
    if 0 < m % group < p:
        return f"groups of {group} leave {m % group} for the last one, which needs at least {p}; take another size"
    return None


# By the name of the schedule; a schedule that is none of the core's says it itself.
TAKES: dict[str, Callable[..., str | None]] = {"interleaved": _groups}
