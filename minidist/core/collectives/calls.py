"""The collectives as a user calls them: check the arguments, choose the algorithm, run it now or on the stream.

    all_reduce(comm, array)  ──▶  _call: ALGORITHMS["all_reduce"]["ring"].run(call, array, "sum")

Sizes that do not fit are refused here, and what else can be wrong on one rank alone by `hooks.call_checks`, before a
message is sent; what differs between ranks (sizes, dtypes, operations) is noticed by the messages. The return type is
an array, or None where the function says so, or with `async_op=True` a `Work`: `Any` to a type checker.

Proved by: tests/collectives/test_collectives.py
"""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any, SupportsIndex
from zlib import crc32

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import MAX_QUOTED, UsageError, check_divisible, quoted
from minidist.core.base.layout import chunk_sizes
from minidist.core.collectives.registry import ALGORITHMS
from minidist.core.comm.point_to_point import PointToPoint


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

    equal: a text that every rank must pass equal (whose gradient it is); compared with each message, at no cost.
    """
    for check in hooks.call_checks:
        check(comm, "all_reduce", array, op)
    return _call(comm, "all_reduce", algorithm, async_op, array, op, reduction=op, equal=equal)


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
    for check in hooks.call_checks:
        check(comm, "reduce_scatter", array, op, out)
    sizes = _chunks_of(comm, "reduce_scatter", array.size, counts)
    if counts is not None:  # some algorithms send none of a rank's counts
        equal = f"{equal} {_counts_text(sizes)}".strip()
    out = _output(comm, "reduce_scatter", out, sizes[comm.rank], array)
    return _call(comm, "reduce_scatter", algorithm, async_op, array, sizes, out, op, reduction=op, equal=equal)


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
    for check in hooks.call_checks:
        check(comm, "all_gather", shard, out=out)
    sizes = _shards_like(comm, "all_gather", shard.size, counts)
    out = _output(comm, "all_gather", out, sum(sizes), shard)
    return _call(comm, "all_gather", algorithm, async_op, shard, sizes, out, total=sum(sizes), equal=equal)


def broadcast(
    comm: PointToPoint, array: np.ndarray, root: int = 0, *, algorithm: str = "naive", async_op: bool = False
) -> Any:
    """Replace every rank's `array` by the root's, in place; returns it."""
    for check in hooks.call_checks:
        check(comm, "broadcast", array)
    root = _root(comm, "broadcast", root)
    return _call(comm, "broadcast", algorithm, async_op, array, root, root=root)


def reduce(
    comm: PointToPoint,
    array: np.ndarray,
    root: int = 0,
    op: str = "sum",
    *,
    algorithm: str = "naive",
    async_op: bool = False,
) -> Any:
    """Give the root the sum (`op`) of all ranks' arrays, as a new array; the others get None."""
    for check in hooks.call_checks:
        check(comm, "reduce", array, op)
    root = _root(comm, "reduce", root)
    return _call(comm, "reduce", algorithm, async_op, array, root, op, reduction=op, root=root)


def gather(
    comm: PointToPoint,
    shard: np.ndarray,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    algorithm: str = "naive",
    async_op: bool = False,
) -> Any:
    """Give the root all shards (flattened) one after the other; the others get None. counts as in `all_gather`."""
    for check in hooks.call_checks:
        check(comm, "gather", shard)
    sizes, root = _shards_like(comm, "gather", shard.size, counts), _root(comm, "gather", root)
    return _call(comm, "gather", algorithm, async_op, shard, sizes, root, total=sum(sizes), root=root)


def scatter(
    comm: PointToPoint,
    array: np.ndarray | None,
    out: np.ndarray,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    algorithm: str = "naive",
    async_op: bool = False,
) -> Any:
    """Receive chunk r of the root's `array` into `out` (1-D on the wire) on rank r; returns `out`.

    Only the root passes `array`; the others pass None. counts as in `reduce_scatter`; only the root needs them.
    """
    root = _root(comm, "scatter", root)
    for check in hooks.call_checks:
        check(comm, "scatter", out, out=out)
    # Only the root has the array and its counts.
    sizes: list[int] = []
    if comm.rank == root:
        if array is None:
            raise UsageError(f"rank {comm.rank}: the root of a scatter must pass the array")
        for check in hooks.call_checks:
            check(comm, "scatter", array, out=out)
        sizes = _chunks_of(comm, "scatter", array.size, counts)
        _output(comm, "scatter", out, sizes[root], array)

    # Only the root knows how much moves, and all ranks must make the same choice: "auto" decides by the latency alone.
    return _call(comm, "scatter", algorithm, async_op, array, sizes, out, root, total=0, root=root)


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
    for check in hooks.call_checks:
        check(comm, "all_to_all", array)
    if (send_counts is None) != (receive_counts is None):
        raise UsageError(f"rank {comm.rank}: all_to_all needs both send_counts and receive_counts, or none")

    # Equal chunks: every rank knows all sizes, so any algorithm will do.
    if send_counts is None or receive_counts is None:
        check_divisible(array.size, "elements of an all_to_all", comm.size, or_else="pass counts")
        sends = receives = [array.size // comm.size] * comm.size  # the very same list: bruck knows by it
        return _call(comm, "all_to_all", algorithm, async_op, array, sends, receives)

    # Ragged chunks: a rank knows its own row and column of the table of counts only.
    sends = _chunks_of(comm, "all_to_all", array.size, send_counts)
    receives = _integers(comm, "all_to_all", receive_counts)
    if len(receives) != comm.size or min(receives) < 0 or receives[comm.rank] != sends[comm.rank]:
        raise UsageError(
            f"rank {comm.rank}: all_to_all with receive_counts {receives}; it needs {comm.size} counts of at least 0, "
            f"its own equal to what it sends itself, {sends[comm.rank]}"
        )
    # No rank knows the others' counts, and all must make the same choice.
    chosen = "pairwise" if algorithm == "auto" else algorithm
    return _call(comm, "all_to_all", chosen, async_op, array, sends, receives)


def barrier(comm: PointToPoint) -> None:
    """Block until every rank has entered."""
    if comm.world.folds:
        hooks.one_event[-1]().barrier_as_one_event(comm)
    else:
        comm.barrier()


def _call(
    comm: PointToPoint,
    operation: str,
    algorithm: str,
    async_op: bool,
    array: np.ndarray | None,
    *arguments: Any,
    reduction: str = "sum",
    total: int | None = None,
    root: int | None = None,
    equal: str = "",
) -> Any:
    """Open a collective call and run the algorithm on it, now or on the communicator's stream.

    total: elements of the whole, which "auto" chooses by, a number that all ranks know; default: those of `array`.
    root: of an operation that has one. equal: what else must be equal on both sides of each message.
    """
    # Chosen from what every rank knows, or they would run different algorithms.
    if algorithm in hooks.choosers:
        elements = total if total is not None else 0 if array is None else array.size
        algorithm = hooks.choosers[algorithm](comm, operation, elements * (1 if array is None else array.itemsize))
    chosen = ALGORITHMS[operation][algorithm]
    function = chosen.run
    if comm.world.folds:
        function = partial(hooks.one_event[-1]().run_as_one_event, operation, chosen)
    algorithm = chosen.name  # also of another spelling, and of FILE.py:FUNCTION

    # What must be equal on both sides of each message: the algorithm, the reduction, the root and, because arrays
    # travel flattened and (2, 3) would meet (3, 2), the shape.
    name = f"{operation}/{algorithm}" if reduction == "sum" else f"{operation}/{algorithm} {reduction}"
    shape = equal
    if array is not None and array.ndim != 1 and operation in ("all_reduce", "reduce_scatter", "reduce", "broadcast"):
        shape = f"{equal} {list(array.shape)}" if equal else str(list(array.shape))

    # One number for the whole call; all its messages carry it as their tag.
    call = comm.collective(name, shape, root, chosen.is_users, array)

    if not async_op:
        return function(call, array, *arguments)
    used = []  # what the caller leaves alone until the wait
    for argument in (array, *arguments):
        if isinstance(argument, np.ndarray):
            used.append(argument)
    return call.run_async(partial(function, call, array, *arguments), used)


def _integers(comm: PointToPoint, operation: str, counts: Sequence[int]) -> list[int]:
    """Return the counts as Python integers; 2.5 is refused, not rounded."""
    try:
        return [index(count) for count in counts]
    except TypeError:
        raise UsageError(
            f"rank {comm.rank}: {operation} with counts {list(counts)}; a count is a whole number of elements"
        ) from None


def _chunks_of(comm: PointToPoint, operation: str, total: int, counts: Sequence[int] | None) -> list[int]:
    """Return the elements of each rank's chunk of `total` elements."""
    if counts is None:
        return chunk_sizes(total, comm.size)
    sizes = _integers(comm, operation, counts)
    if len(sizes) != comm.size or sum(sizes) != total or min(sizes) < 0:
        raise UsageError(
            f"rank {comm.rank}: {operation} of {total} elements with counts {sizes}; "
            f"it needs {comm.size} counts of at least 0 that sum to {total}"
        )
    return sizes


def _counts_text(sizes: list[int]) -> str:
    """Return the counts, which must be equal on both sides of each message; "" for those that need not be passed."""
    if sizes == chunk_sizes(sum(sizes), len(sizes)):
        return ""
    text = str(sizes)
    return f"counts {text}" if len(text) <= MAX_QUOTED else f"counts #{crc32(text.encode()):x}"


def _shards_like(comm: PointToPoint, operation: str, size: int, counts: Sequence[int] | None) -> list[int]:
    """Return the elements of each rank's shard; this rank's shard has `size`."""
    if counts is None:
        return [size] * comm.size
    sizes = _integers(comm, operation, counts)
    if len(sizes) != comm.size or sizes[comm.rank] != size or min(sizes) < 0:
        raise UsageError(
            f"rank {comm.rank}: {operation} of {size} elements with counts {sizes}; it needs {comm.size} counts, and"
            f" that of rank {comm.rank} must be {size}: every rank passes as many elements as its count says"
        )
    return sizes


def _output(comm: PointToPoint, operation: str, out: np.ndarray | None, size: int, like: np.ndarray) -> np.ndarray:
    """Return the flat array for the result: a new one, or the caller's when it has the right size and dtype."""
    if out is None:
        return xp.empty_like(like, shape=(size,))
    if out.size != size or out.dtype != like.dtype or not out.flags.c_contiguous:
        raise UsageError(
            f"rank {comm.rank}: {operation} needs a C-contiguous out of {size} elements of {like.dtype}, "
            f"got {out.size} of {out.dtype}" + ("" if out.flags.c_contiguous else f" with strides {out.strides}")
        )
    return out.reshape(-1)


def _root(comm: PointToPoint, operation: str, root: int) -> int:
    """Return the root as a Python integer, in 0..size-1."""
    if not isinstance(root, SupportsIndex) or not 0 <= index(root) < comm.size:
        raise UsageError(f"rank {comm.rank}: {operation} with root {quoted(root)}; ranks are 0..{comm.size - 1}")
    return index(root)
