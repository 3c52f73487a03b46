"""What this package adds to its core, wherever the core runs: imported with the package, it loads nothing else.

Each function imports what it needs when the core calls it.

Proved by: tests/base/test_hooks.py
"""

from typing import Any

from minidist.base import hooks

# Files of minidist/collectives that register no algorithm.
_NO_ALGORITHMS = (
    "auto",
    "calls",
    "closed_forms",
    "nodes",
    "one_event",
    "operations",
    "registry",
    "ring_event",
    "tuning",
    "user_algorithms",
)


def _choose(comm: Any, operation: str, nbytes: int) -> str:
    from minidist.collectives.auto import choose

    return choose(comm, operation, nbytes)


def _more_algorithms() -> None:
    from minidist import collectives
    from minidist.base.registry import import_modules

    import_modules(collectives.__name__, collectives.__path__, without=_NO_ALGORITHMS)


def _algorithm_of_a_file(operation: str, name: str) -> Any:
    if ".py:" not in name:
        return None
    from minidist.collectives.user_algorithms import load_algorithm

    return load_algorithm(name, operation)[1]


def _run_as_one_event(*arguments: Any) -> Any:
    from minidist.collectives.one_event import run_as_one_event

    return run_as_one_event(*arguments)


def _barrier_as_one_event(comm: Any) -> None:
    from minidist.collectives.one_event import barrier_as_one_event

    barrier_as_one_event(comm)


hooks.choosers["auto"] = _choose
hooks.more_algorithms.append(_more_algorithms)
hooks.algorithm_sources.append(_algorithm_of_a_file)
hooks.one_event.update(call=_run_as_one_event, barrier=_barrier_as_one_event)
