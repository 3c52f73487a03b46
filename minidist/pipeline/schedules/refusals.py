"""What a schedule refuses: sizes that it cannot have, and options that it does not know.

Proved by: tests/pipeline/test_plans.py, tests/commands/test_schedule.py
"""

import inspect
from collections.abc import Mapping
from typing import Any

from minidist.core.base.errors import UsageError, nearest, quoted
from minidist.core.pipeline.plan.registry import Schedule

MAX_FORWARDS = 1_000_000  # of a plan; a second or two on one core for each hundred thousand


def check_schedule(
    schedule: Schedule, stages: int, microbatches: int, chunks: int | None, options: Mapping[str, Any]
) -> None:
    """Raise UsageError unless a schedule can have these ranks, micro-batches and chunks, and knows the options."""
    _check_sizes(schedule, stages, microbatches, chunks)
    _check_options(schedule, options)
    if schedule.takes is None:
        return
    judged = inspect.signature(schedule.takes).parameters
    given = {option: value for option, value in options.items() if option in judged}
    problem = schedule.takes(stages, microbatches, schedule.chunks or chunks or 2, **given)
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
