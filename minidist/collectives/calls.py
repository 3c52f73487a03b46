"""The collectives as a user calls them: arguments are checked, an algorithm is found, a channel opened, the work run or
posted.

The return type is an array, or None where the function says so, or with `async_op=True` a `Work`: `Any` to a type
checker.
"""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.layout import chunk_sizes
from minidist.collectives.auto import choose
from minidist.collectives.operations import check_op
from minidist.collectives.registry import find
from minidist.comm.buffers import may_overlap
from minidist.comm.communicator import Comm


def all_reduce(
    comm: Comm, array: np.ndarray, op: str = "sum", *, algorithm: str = "ring", async_op: bool = False
) -> Any:
    """Every rank's `array` becomes the sum (`op`) of all ranks' arrays, in place; returns it."""
    _check(comm, "all_reduce", array)
    if not array.flags.writeable:
        raise UsageError(
            f"rank {comm.rank}: all_reduce of an array that is read-only, where the sum would go; pass a copy"
        )
    check_op(op, array)
    return _call(comm, "all_reduce", algorithm, async_op, array, op, variant=op)


def reduce_scatter(
    comm: Comm,
    array: np.ndarray,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    algorithm: str = "ring",
    async_op: bool = False,
) -> Any:
    """Rank r gets chunk r of the sum of all ranks' arrays (flattened); `array` itself is left as it was.

    counts: elements of each rank's chunk; default `chunk_sizes(array.size, comm.size)`. out: where the chunk goes, in
    memory of its own.
    """
    _check(comm, "reduce_scatter", array)
    check_op(op, array)
    sizes = _counts(comm, counts, array.size, "reduce_scatter")
    out = _output(comm, out, sizes[comm.rank], array, "reduce_scatter")
    if may_overlap(out, array):
        raise UsageError(
            f"rank {comm.rank}: reduce_scatter into its own input, which other ranks still need; pass an out elsewhere"
        )
    return _call(comm, "reduce_scatter", algorithm, async_op, array, sizes, out, op, variant=op)


def all_gather(
    comm: Comm,
    shard: np.ndarray,
    *,
    counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    algorithm: str = "ring",
    async_op: bool = False,
) -> Any:
    """Every rank gets all ranks' shards (flattened), one after the other in rank order.

    counts: elements of each rank's shard; default: all as large as this one. out: where the whole goes; a shard that
    already lies at its place in `out` is not copied.
    """
    _check(comm, "all_gather", shard)
    sizes = _shard_counts(comm, counts, shard.size, "all_gather")
    out = _output(comm, out, sum(sizes), shard, "all_gather")
    return _call(comm, "all_gather", algorithm, async_op, shard, sizes, out, total=sum(sizes))


def broadcast(comm: Comm, array: np.ndarray, root: int = 0, *, algorithm: str = "naive", async_op: bool = False) -> Any:
    """Every rank's `array` becomes the root's, in place; returns it."""
    _check(comm, "broadcast", array)
    return _call(comm, "broadcast", algorithm, async_op, array, _root(comm, root, "broadcast"))


def reduce(
    comm: Comm, array: np.ndarray, root: int = 0, op: str = "sum", *, algorithm: str = "naive", async_op: bool = False
) -> Any:
    """The root gets the sum (`op`) of all ranks' arrays, as a new array; the others get None."""
    _check(comm, "reduce", array)
    check_op(op, array)
    return _call(comm, "reduce", algorithm, async_op, array, _root(comm, root, "reduce"), op, variant=op)


def gather(
    comm: Comm,
    shard: np.ndarray,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    algorithm: str = "naive",
    async_op: bool = False,
) -> Any:
    """The root gets all shards (flattened) one after the other; the others get None. counts as in `all_gather`."""
    _check(comm, "gather", shard)
    sizes = _shard_counts(comm, counts, shard.size, "gather")
    root = _root(comm, root, "gather")
    return _call(comm, "gather", algorithm, async_op, shard, sizes, root, total=sum(sizes))


def scatter(
    comm: Comm,
    array: np.ndarray | None,
    out: np.ndarray,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    algorithm: str = "naive",
    async_op: bool = False,
) -> Any:
    """Rank r receives chunk r of the root's `array` into `out` (1-D on the wire); returns it.

    Only the root passes `array`; the others pass None. counts as in `reduce_scatter`; only the root needs them.
    """
    root = _root(comm, root, "scatter")
    sizes: list[int] = []
    _check(comm, "scatter", out)
    _output(comm, out, out.size, out, "scatter")
    if comm.rank == root:
        if array is None:
            raise UsageError(f"rank {comm.rank}: the root of a scatter must pass the array")
        _check(comm, "scatter", array)
        sizes = _counts(comm, counts, array.size, "scatter")
        _output(comm, out, sizes[root], array, "scatter")
        if may_overlap(out, array):
            raise UsageError(
                f"rank {comm.rank}: scatter into its own array, which other ranks still need; pass an out elsewhere"
            )
    return _call(comm, "scatter", algorithm, async_op, array, sizes, out, root, total=0)


def all_to_all(
    comm: Comm,
    array: np.ndarray,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    algorithm: str = "pairwise",
    async_op: bool = False,
) -> Any:
    """Rank r gets chunk r of every rank's array, one after the other in rank order, as a new 1-D array.

    send_counts[j]: elements for rank j; receive_counts[j]: elements from rank j. Default: equal chunks (the size must
    divide). Pass both or none.
    """
    _check(comm, "all_to_all", array)
    if (send_counts is None) != (receive_counts is None):
        raise UsageError(f"rank {comm.rank}: all_to_all needs both send_counts and receive_counts, or none")
    if send_counts is None and array.size % comm.size:
        raise UsageError(
            f"rank {comm.rank}: all_to_all of {array.size} elements over {comm.size} ranks does not divide; pass counts"
        )
    sends = _counts(comm, send_counts, array.size, "all_to_all")
    receives = sends if receive_counts is None else _whole(comm, receive_counts, "all_to_all")
    if len(receives) != comm.size or min(receives) < 0 or receives[comm.rank] != sends[comm.rank]:
        raise UsageError(
            f"rank {comm.rank}: all_to_all with receive_counts {receives}; it needs {comm.size} counts of at least 0, "
            f"its own equal to what it sends itself, {sends[comm.rank]}"
        )
    if algorithm == "auto" and send_counts is not None:
        algorithm = "pairwise"  # nobody knows the others' counts, and all must choose alike
    return _call(comm, "all_to_all", algorithm, async_op, array, sends, receives)


def barrier(comm: Comm) -> None:
    """Nobody leaves before everybody has entered."""
    comm.barrier()


def _check(comm: Comm, operation: str, array: Any) -> None:
    if not hasattr(array, "flags") or isinstance(array, np.generic):
        raise UsageError(
            f"rank {comm.rank}: {operation} of a {type(array).__name__}; collectives work on arrays: pass"
            " numpy.array(...)"
        )


def _call(
    comm: Comm,
    operation: str,
    algorithm: str,
    async_op: bool,
    array: np.ndarray | None,
    *arguments: Any,
    variant: str = "sum",
    total: int | None = None,
) -> Any:
    """Open a channel for the call and run the algorithm on it, now or in the communicator's lane.

    total: elements of the whole, which "auto" chooses by: a number that all ranks know; default those of `array`. (Only
    the
    root knows how much a scatter moves: 0 there, so that the latency alone decides.)

    variant: the reduction; part of the channel's name unless it is the sum, so that ranks that reduce differently are
    told.
    """
    if algorithm == "auto":
        itemsize = 1 if array is None else array.itemsize
        elements = total if total is not None else 0 if array is None else array.size
        algorithm = choose(comm, operation, elements * itemsize)
    function = find(operation, algorithm)
    if array is not None and not array.flags.c_contiguous:
        raise UsageError(
            f"rank {comm.rank}: {operation} of an array with strides {array.strides}; pass a C-contiguous array"
        )
    alike = ""
    if operation in ("all_reduce", "reduce_scatter", "reduce", "broadcast") and array is not None and array.ndim != 1:
        alike = str(list(array.shape))  # travels flattened: (2, 3) would meet (3, 2)
    channel = comm.collective(f"{operation}/{algorithm}" + ("" if variant == "sum" else f" {variant}"), alike)
    run = partial(function, channel, array, *arguments)
    return channel.post(run, [a for a in (array, *arguments) if isinstance(a, np.ndarray)]) if async_op else run()


def _whole(comm: Comm, counts: Sequence[int], operation: str) -> list[int]:
    """The counts as Python's integers; 2.5 is none."""
    try:
        return [index(count) for count in counts]
    except TypeError:
        raise UsageError(
            f"rank {comm.rank}: {operation} with counts {list(counts)}; a count is a whole number of elements"
        ) from None


def _counts(comm: Comm, counts: Sequence[int] | None, total: int, operation: str) -> list[int]:
    sizes = chunk_sizes(total, comm.size) if counts is None else _whole(comm, counts, operation)
    if len(sizes) != comm.size or sum(sizes) != total or min(sizes) < 0:
        raise UsageError(
            f"rank {comm.rank}: {operation} of {total} elements with counts {sizes}; "
            f"it needs {comm.size} counts of at least 0 that sum to {total}"
        )
    return sizes


def _shard_counts(comm: Comm, counts: Sequence[int] | None, size: int, operation: str) -> list[int]:
    sizes = [size] * comm.size if counts is None else _whole(comm, counts, operation)
    if len(sizes) != comm.size or sizes[comm.rank] != size or min(sizes) < 0:
        raise UsageError(
            f"rank {comm.rank}: {operation} of {size} elements with counts {sizes}; "
            f"it needs {comm.size} counts, its own equal to the shard's size"
        )
    return sizes


def _output(comm: Comm, out: np.ndarray | None, size: int, like: np.ndarray, operation: str) -> np.ndarray:
    if out is None:
        return np.empty_like(like, shape=(size,))
    if out.size != size or out.dtype != like.dtype or not out.flags.c_contiguous:
        raise UsageError(
            f"rank {comm.rank}: {operation} needs a C-contiguous out of {size} elements of {like.dtype}, "
            f"got {out.size} of {out.dtype}" + ("" if out.flags.c_contiguous else f" with strides {out.strides}")
        )
    if not out.flags.writeable:
        raise UsageError(f"rank {comm.rank}: {operation} into an out that is read-only; pass one that may be written")
    return out.reshape(-1)


def _root(comm: Comm, root: int, operation: str) -> int:
    if not isinstance(root, SupportsIndex) or not 0 <= index(root) < comm.size:
        raise UsageError(f"rank {comm.rank}: {operation} with root {root!r}; ranks are 0..{comm.size - 1}")
    return index(root)
