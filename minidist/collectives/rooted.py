"""Collectives in which one rank has a separate part: reduce and gather to a root, scatter from it.

Like the collectives of the core they are made of point-to-point messages, and take the name of an algorithm.

Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.collectives.call_checks import check_call
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes
from minidist.core.collectives.calls import run_call
from minidist.core.comm.communicator import PointToPoint


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
    equal = check_call(comm, "reduce", array, op, root=root)
    root = int(root)
    return run_call(comm, "reduce", algorithm, async_op, array, root, op, op=op, root=root, equal=equal)


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
    check_call(comm, "gather", shard, root=root, counts=counts)
    sizes, root = [shard.size] * comm.size if counts is None else list(map(int, counts)), int(root)
    return run_call(
        comm, "gather", algorithm, async_op, shard, sizes, root, nbytes=shard.itemsize * sum(sizes), root=root
    )


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
    check_call(comm, "scatter", out, root=root)
    root = int(root)
    # Only the root has the array and its counts.
    sizes: list[int] = []
    if comm.rank == root:
        if array is None:
            raise UsageError(f"rank {comm.rank}: the root of a scatter must pass the array")
        check_call(comm, "scatter", array, out=out, counts=counts)
        sizes = chunk_sizes(array.size, comm.size) if counts is None else list(map(int, counts))

    # Only the root knows how much moves, and all ranks must make the same choice: "auto" decides by the latency alone.
    return run_call(comm, "scatter", algorithm, async_op, array, sizes, out, root, nbytes=0, root=root)
