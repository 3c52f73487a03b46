"""Results that many layouts of one search share, such as the seconds of a layer, are computed once.

Proved by: tests/planning/test_cluster.py
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def shared(of: Callable[P, tuple[Any, ...]], key: Callable[P, Hashable]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it keeps its results for as long as it is called for the same job.

    of: the objects that the results belong to (the job, the machine); when one of them changes, the cache is cleared.
    key: what else the function reads of its arguments. A key that leaves out what the function reads makes results
    wrong; a test compares the layouts of a search with layouts that are computed alone.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kept: dict[Hashable, R] = {}
        owners: tuple[Any, ...] = ()

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal owners
            now = of(*args, **kwargs)
            # The owners are not in the key, because to hash a job takes longer than most of the functions.
            if now != owners:
                kept.clear()
                owners = now
            at = key(*args, **kwargs)
            try:
                return kept[at]
            except KeyError:
                return kept.setdefault(at, function(*args, **kwargs))

        return call

    return decorate
