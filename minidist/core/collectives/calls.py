"""The collectives: their algorithms by name, how contributions are added, and the calls that a user makes.

    all_reduce(comm, array)  ──▶  run_call: ALGORITHMS["all_reduce"]["ring"].run(call, array, "sum")

An algorithm says in its own file what it sends and how long it takes (`@algorithm`, see ring.py), so that the formula
stands above the loop that it describes. The tests compare every trace with the formulas, and `algorithm="auto"` chooses
by the seconds on the communicator's links (minidist/collectives/auto.py).

What can be wrong on one rank alone is refused by `hooks.check_call`, before a message is sent; it returns what must be
equal on both sides of each message, by which the messages notice what differs between ranks. The return type is an
array, or None where the function says so, or with `async_op=True` a `Work`: `Any` to a type checker.

Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.layout import chunk_sizes
from minidist.core.base.registry import Registry
from minidist.core.comm.communicator import PointToPoint, Work
from minidist.core.comm.mesh import check_communicator

Function = TypeVar("Function", bound=Callable[..., Any])
Sends = Callable[..., tuple[int, int]]
Seconds = Callable[..., float]


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
    sends: Sends | None
    seconds: Seconds | None
    is_users: bool = False


# Of `gather`, `reduce` and `scatter` the algorithms are in minidist/collectives.
OPERATIONS = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]
ALGORITHMS: dict[str, Registry[Algorithm]] = {operation: Registry(f"{operation} algorithm") for operation in OPERATIONS}


def algorithm(
    operation: str, name: str, *, sends: Sends | None = None, seconds: Seconds | None = None
) -> Callable[[Function], Function]:
    """Register a function of this package as `operation`'s algorithm `name`. See `Algorithm` for the two formulas."""

    def register(function: Function) -> Function:
        ALGORITHMS[operation].add(name, Algorithm(name, function, sends, seconds))
        return function

    return register


# How two contributions become one, element by element.
UFUNCS: dict[str, Any] = {"sum": xp.add, "avg": xp.add, "max": xp.maximum, "min": xp.minimum, "prod": xp.multiply}


def accumulate(op: str, total: np.ndarray, contribution: np.ndarray, out: np.ndarray | None = None) -> None:
    """total = total (op) contribution, in the arrays' own dtype, without a temporary.

    out: where the result goes instead; it may be `contribution`, where ranks must agree on which of the two is first.
    """
    # A library adds narrow numbers (16-bit floats, short integers) and large arrays in another way.
    out = total if out is None else out
    plain = out.dtype.char in "fd" and out.nbytes <= hooks.read_by_others
    if plain or not hooks.special_sum(op, total, contribution, out):
        UFUNCS[op](total, contribution, out=out)


def divide(total: np.ndarray, ranks: int) -> None:
    """Divide a sum in place, once, at the end: the last step of "avg"."""
    if total.itemsize == 2 and xp.is_half(total.dtype):
        total[...] = xp.downcast(xp.upcast(total) / np.float32(ranks), total.dtype)  # bfloat16 cannot hold 257 ranks
    else:
        total /= total.dtype.type(ranks)


def all_reduce(
    comm: PointToPoint,
    array: np.ndarray,
    op: str = "sum",
    *,
    algorithm: str = "ring",
    async_op: bool = False,
    equal: str = "",
) -> Any:
    """Replace every rank's `array` by the sum (`op`) of all ranks' arrays, in place; returns it.

    equal: a text that every rank must pass equal (whose gradient it is); worlds that check messages compare it.
    """
    # Where nothing is recorded, `comm.last` keeps the last call, and a call like it runs without the checks: they take
    # as long as a short message.
    if getattr(comm, "last", None) and not async_op and comm.again(array, op, algorithm):
        return array
    equal = hooks.check_call(comm, "all_reduce", array, op, equal)
    return run_call(comm, "all_reduce", algorithm, async_op, array, op, op=op, equal=equal)


def reduce_scatter(
    comm: PointToPoint,
    array: np.ndarray,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    algorithm: str = "ring",
    async_op: bool = False,
    equal: str = "",
) -> Any:
    """Give rank r chunk r of the sum of all ranks' arrays (flattened); `array` itself is left as it was.

    counts: elements of each rank's chunk; default `chunk_sizes(array.size, comm.size)`. out: where the chunk goes, in
    separate memory. equal: as in `all_reduce`.
    """
    equal = hooks.check_call(comm, "reduce_scatter", array, op, equal, out, counts=counts)
    sizes = chunk_sizes(array.size, comm.size) if counts is None else list(map(int, counts))
    out = xp.empty_like(array, shape=(sizes[comm.rank],)) if out is None else out.reshape(-1)
    return run_call(comm, "reduce_scatter", algorithm, async_op, array, sizes, out, op, op=op, equal=equal)


def all_gather(
    comm: PointToPoint,
    shard: np.ndarray,
    *,
    counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    algorithm: str = "ring",
    async_op: bool = False,
    equal: str = "",
) -> Any:
    """Give every rank all ranks' shards (flattened), one after the other in rank order.

    counts: elements of each rank's shard; default: all as large as this one. out: where the whole goes; a shard that
    already lies at its place in `out` is not copied. equal: as in `all_reduce`.
    """
    equal = hooks.check_call(comm, "all_gather", shard, out=out, counts=counts, equal=equal)
    sizes = [shard.size] * comm.size if counts is None else list(map(int, counts))
    out = xp.empty_like(shard, shape=(sum(sizes),)) if out is None else out.reshape(-1)
    return run_call(comm, "all_gather", algorithm, async_op, shard, sizes, out, nbytes=out.nbytes, equal=equal)


def broadcast(
    comm: PointToPoint, array: np.ndarray, root: int = 0, *, algorithm: str = "naive", async_op: bool = False
) -> Any:
    """Replace every rank's `array` by the root's, in place; returns it."""
    equal = hooks.check_call(comm, "broadcast", array, root=root)
    root = int(root)
    return run_call(comm, "broadcast", algorithm, async_op, array, root, root=root, equal=equal)


def all_to_all(
    comm: PointToPoint,
    array: np.ndarray,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    algorithm: str = "pairwise",
    async_op: bool = False,
) -> Any:
    """Give rank r chunk r of every rank's array, one after the other in rank order, as a new 1-D array.

    send_counts[j]: elements for rank j; receive_counts[j]: elements from rank j. Default: equal chunks (the number of
    ranks must divide the size). Pass both or none.
    """
    hooks.check_call(comm, "all_to_all", array, counts=(send_counts, receive_counts))

    if send_counts is None or receive_counts is None:
        sends = receives = [array.size // comm.size] * comm.size  # one list: Bruck's algorithm tests for it
    else:
        sends, receives = list(map(int, send_counts)), list(map(int, receive_counts))
        # A rank knows its own row and column of the table of counts only, and all must make the same choice.
        algorithm = "pairwise" if algorithm == "auto" else algorithm
    return run_call(comm, "all_to_all", algorithm, async_op, array, sends, receives)


def barrier(comm: PointToPoint) -> None:
    """Block until every rank has entered."""
    check_communicator(comm, "barrier")
    comm.barrier()


def run_call(
    comm: PointToPoint,
    operation: str,
    algorithm: str,
    async_op: bool,
    *arguments: Any,
    op: str = "sum",
    nbytes: int | None = None,
    root: int | None = None,
    equal: str = "",
) -> Any:
    """Open a collective call and run the algorithm on it, now or on the communicator's stream.

    arguments: of the algorithm, after the call; the first one is the array. op: of an operation that adds. nbytes: of
    the whole, which "auto" chooses by, a number that all ranks know; default: those of the array. root: of an operation
    that has one. equal: what else must be equal on both sides of each message.
    """
    # Chosen from what every rank knows, or they would run different algorithms.
    algorithm = str(algorithm)  # a list could not be looked up
    if algorithm in hooks.choosers:
        algorithm = hooks.choosers[algorithm](comm, operation, arguments[0].nbytes if nbytes is None else nbytes)

    chosen = ALGORITHMS[operation][algorithm]
    function = partial(hooks.one_event().run_as_one_event, operation, chosen) if comm.world.folds else chosen.run

    # One number for the whole call; all its messages carry it as their tag. With `equal`, the name is what must be
    # equal on both sides of each message, however the algorithm is spelled.
    name = f"{operation}/{chosen.name} {op}".removesuffix(" sum")
    call = comm.collective(name, equal or "", root, chosen.is_users, arguments[0])
    if async_op:
        return comm.world.run_async(Work(call, partial(function, call, *arguments), arguments))
    result = function(call, *arguments)
    if comm.last is not None and operation == "all_reduce" and not chosen.is_users:
        comm.last[:] = [((algorithm, op, arguments[0].dtype), call, function)]
    return result
