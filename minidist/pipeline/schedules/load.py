"""A plan from the command line: a schedule's name, a CSV file, or a function in a Python file.

Proved by: tests/commands/test_schedule.py
"""

import inspect
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import index
from typing import Any

from minidist.base.errors import UsageError, quoted, quoted_path, reason
from minidist.base.user_file import is_user_function, load_function
from minidist.core.pipeline.plan import Item, Plan
from minidist.core.pipeline.schedules import get_schedule
from minidist.pipeline.plan_methods import show
from minidist.pipeline.schedules.text import from_cells, read_csv
from minidist.pipeline.updates import UPDATE_RULES

MAX_CELLS = 10_000_000  # actions and ranks that a user's function may return


def load_plan(
    source: str, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None, **options: Any
) -> Plan:
    """Return the plan of `source`: a name ("1f1b"), "my.csv" or "my.py:function".

    The function takes (p, m), or (p, m, v) with v chunks, and returns a Plan or, for each rank, its actions as text or
    numbers. A file's plan says itself how many ranks and micro-batches it has; when they are given too they must agree.
    """
    if not isinstance(source, str):
        raise UsageError(f"load_plan({quoted(source)}); pass the name of a schedule, FILE.csv or FILE.py:FUNCTION")
    if source.endswith(".csv"):
        for name, given in (
            ("--chunks", chunks),
            *((f"--option {option}", value) for option, value in options.items()),
        ):
            if given is not None:
                raise UsageError(
                    f"{name} {given} has no effect on the plan {quoted_path(source)}, which is written down;"
                    " leave it out"
                )
        plan = read_csv(source)
    elif is_user_function(source):
        check_sizes(source, stages, microbatches)
        plan = _call(source, stages or 1, microbatches or 1, chunks, options)
    else:
        schedule = get_schedule(source)  # a wrong name first
        check_sizes(source, stages, microbatches)
        return schedule.plan(stages or 0, microbatches or 0, chunks, **options)
    for name, given, has in (("--stages", stages, plan.ranks), ("--microbatches", microbatches, plan.microbatches)):
        if given is not None and given != has:
            raise UsageError(
                f"{name} is {given} and the plan {quoted_path(source)} has {has}; leave {name} out or change the plan"
            )
    return plan


def check_sizes(source: str, stages: int | None, microbatches: int | None) -> None:
    """Raise UsageError when a size that the source needs is missing or not positive."""
    for name, value in (("--stages", stages), ("--microbatches", microbatches)):
        if value is None:
            raise UsageError(f"schedule {quoted_path(source)} needs {name}; give a number of at least 1")
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")


def _call(source: str, p: int, m: int, v: int | None, options: dict[str, Any]) -> Plan:
    # The name in sentences is short, however long the path is.
    function, shown = load_function(source), quoted_path(source, marks=False)

    # What the function returns is read as the cells of a file are, so that every item is checked.
    try:
        takes_v = "v" in inspect.signature(function).parameters
        result = function(p, m, **({"v": v or 2} if takes_v else {}), **options)
        plan = result if isinstance(result, Plan) else None
        cells = [[_cell(item) for item in row] for row in _rows(plan.orders if plan else result, shown)]
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{shown}({p}, {m}) raised {reason(error, named=True)}; correct the function") from error
    found = from_cells(cells, source.rpartition(":")[2], shown)
    if plan is None:
        return found
    numbers = (plan.stages, plan.microbatches, plan.batch)
    updates = ("flush", "none", *UPDATE_RULES)
    if plan.updates not in updates or not all(isinstance(number, int) and number >= 1 for number in numbers):
        raise UsageError(
            f"{shown} returned {quoted(plan)}; its stages, microbatches and batch must be whole numbers of at least"
            " 1, and"
            f" updates one of {', '.join(updates)}"
        )
    return plan.with_orders(found.orders)


def is_name(source: str) -> bool:
    """Whether `source` is a schedule's name, not a user's own plan."""
    return not source.endswith(".csv") and not is_user_function(source)


def _rows(result: Any, source: str) -> Iterator[list[Any]]:
    """Return the items of each rank; UsageError for what is not a list, and for a generator that does not end."""
    wanted = "it must return, for each rank, a list of actions"
    if isinstance(result, str | dict) or not isinstance(result, Iterable):
        raise UsageError(f"{source} returned {type(result).__name__}; {wanted}")
    left = MAX_CELLS
    for rank, row in enumerate(result):
        if isinstance(row, str | dict) or not isinstance(row, Iterable):
            raise UsageError(f"{source} returned {quoted(row)} for rank {rank}; {wanted}")
        items = list(islice(row, left + 1))
        left -= len(items) + 1
        if left < 0:
            raise UsageError(f"{source} returned more than {MAX_CELLS:,} actions and ranks; {wanted} that ends")
        yield items


def _cell(item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return str(item) if hasattr(item, "kind") else show(_number(item))
    except (TypeError, ValueError, IndexError):
        return repr(item)


def _number(item: Any) -> Item:
    return (index(item[0]), index(item[1])) if isinstance(item, tuple) else index(item)
