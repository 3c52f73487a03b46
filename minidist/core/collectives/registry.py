"""Which algorithms each collective has, and what each of them sends and how long it takes.

An algorithm says all that in its own file, so that the formula stands above the loop that it describes:

    @algorithm(
        "all_reduce",
        "my_name",
        sends=lambda sizes, rank: ...,  # (messages, elements) that leave `rank`
        seconds=lambda nbytes, ranks, alpha, beta: ...,  # until the last rank is done
    )
    def all_reduce(comm, array, op): ...

The tests compare every trace with the formulas, and `algorithm="auto"` chooses by the seconds.

Proved by: tests/collectives/test_closed_form.py, tests/collectives/test_papers.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from minidist.core.base.registry import Registry

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective.

    run: the function, called with the call. sends: (sizes, rank) -> (messages, elements) that leave `rank`, where
    sizes are the elements of each rank's chunk; of an operation with a root both count from the root. seconds:
    (nbytes, ranks, alpha, beta) -> seconds on the alpha-beta clock until the last rank is done, when all ranks begin
    at once and the number of ranks divides the array of `nbytes`. Adding costs nothing there. A formula with a
    parameter `overhead` counts it for every message that waits behind another one at a port. A user's algorithm may
    have neither. is_users: registered by a program, not by minidist.
    """

    name: str
    run: Callable[..., Any]
    sends: Callable[..., tuple[int, int]] | None
    seconds: Callable[..., float] | None
    is_users: bool = False


# What an algorithm of each operation is called with, after the call.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_gather": ("shard", "sizes", "out"),
    "all_reduce": ("array", "op"),
    "all_to_all": ("array", "send_sizes", "receive_sizes"),
    "broadcast": ("array", "root"),
    "gather": ("shard", "sizes", "root"),
    "reduce": ("array", "root", "op"),
    "reduce_scatter": ("array", "sizes", "out", "op"),
    "scatter": ("array", "sizes", "out", "root"),
}


ALGORITHMS: dict[str, Registry[Algorithm]] = {operation: Registry(f"{operation} algorithm") for operation in PARAMETERS}


def algorithm(
    operation: str,
    name: str,
    *,
    sends: Callable[..., tuple[int, int]] | None = None,
    seconds: Callable[..., float] | None = None,
) -> Callable[[Function], Function]:
    """Register a function of this package as `operation`'s algorithm `name`. See `Algorithm` for the two formulas."""

    def register(function: Function) -> Function:
        ALGORITHMS[operation].add(name, Algorithm(name, function, sends, seconds))
        return function

    return register
