"""How each layout leaves pruned entries out of its reductions of gradients, and what is sent.

    replicas    buckets of whole parameters are all-reduced: a hook sends what is kept       `KeptEntries`
    ZeRO 1, 2   buckets are reduce-scattered: each owner's part shrinks to what is kept      `scatter_kept`
    ZeRO 3      units are reduce-scattered: ranks exchange the masks of their shards first   `ReduceKept`

A data axis is known here by what it has: replicas a `parallel`, ZeRO 1 and 2 a `zero`, ZeRO 3 `units`; one device has
nothing to reduce.

Proved by: tests/techniques/test_pruning.py
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from minidist.base import arrays as xp
from minidist.core.base.arrays import downcast
from minidist.core.base.layout import cut
from minidist.core.base.trace import new_purpose, purpose, track
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.parallel.data_parallel import Bucket
from minidist.core.parallel.fsdp import FSDPUnit
from minidist.parallel.comm_hooks import Then, register_comm_hook
from minidist.parallel.compressor import compress
from minidist.parallel.shards import ranges
from minidist.techniques.pruning.pruner import KeptEntries, Part, Pruner

new_purpose("pruning")


def parts(shards: Iterable[Any]) -> list[Part]:
    """Return a data axis's shards of weights, gradients or masks as a pruner takes them."""
    return [Part(shard.parameter.name, shard.values, shard.start) for shard in shards]


def shard_comm(axis: Any) -> Comm | None:
    """Return the ranks that hold shards of the weights of a data axis; None where every rank has all of them."""
    return axis.shards[0].comm if hasattr(axis, "units") else None


def leave_out(axis: Any, pruner: Pruner) -> None:
    """Let a new data axis whose ranks have whole weights reduce the kept entries alone, by the masks of each step."""
    # Equal weights have equal masks on all ranks, so what is pruned need not be sent.
    if hasattr(axis, "parallel"):
        ddp = axis.parallel
        register_comm_hook(ddp.reducer, KeptEntries(ddp.comm, pruner, "sum", ddp.reducer.algorithm), compress)
    elif hasattr(axis, "zero"):
        reducer = axis.zero.reducer
        reducer.scatter = partial(scatter_kept, reducer.comm.rank, reducer.scatter, pruner.kept)


def scatter_kept(
    rank: int,
    scatter: Callable[..., Any],
    kept_of: Callable[[Bucket], xp.Array],
    bucket: Bucket,
    array: xp.Array,
    counts: list[int],
    out: xp.Array,
) -> Then:
    """Start to send each owner the sum of what is kept of its part of a bucket; what is left out becomes zero.

    scatter: of a `ShardReducer`, which is called with what is kept. kept_of: (bucket) -> which elements of it (bool),
    the same on all ranks.
    """
    parts = cut(kept := kept_of(bucket), counts)
    own, counts = parts[rank], [int(part.sum()) for part in parts]
    array = track(array[kept], "communication")
    work = scatter(bucket, array, counts, track(xp.empty(counts[rank], array.dtype, array), "communication"))

    def spread(values: xp.Array) -> xp.Array:
        out[...] = 0
        out[own] = values
        return out

    return Then(work, spread)


def exchange_masks(axis: Any, pruner: Pruner) -> None:
    """Let every unit of ZeRO 3 with weights that may be pruned reduce the kept ones alone: its ranks exchange masks.

    Purpose `pruning`. Other layouts know the masks of all ranks.
    """
    for unit in prunable_units(axis, pruner):
        mine = xp.full(unit.shard.size, True, bool, unit.shard.data)
        for p, place, _, _ in ranges(unit.shard):
            if p.name in pruner.masks:
                mine[place] = pruner.masks[p.name].values
        with purpose("pruning"):
            ReduceKept(unit, mine)


class ReduceKept:
    """Reduces only some elements of a unit; the others' gradients become zero. mine: which of this rank's shard (bool).

    Every rank needs the bits of all shards, to leave out what their owners do: an all-gather of 1/8 B per element.
    """

    def __init__(self, unit: FSDPUnit, mine: xp.Array) -> None:
        self.rank, self.kept = unit.shard.comm.rank, track(all_gather(unit.shard.comm, xp.packbits(mine)), "optimizer")
        self.own = mine  # of the reduction in flight: the elements of the shard that it brings
        # New masks take the place of earlier ones.
        before: Any = getattr(unit.reduce_scatter, "__self__", None)
        self.before: Any = before.before if isinstance(before, ReduceKept) else (unit.reduce_scatter, unit.deliver)
        unit.reduce_scatter, unit.deliver = self.scatter, self.deliver  # type: ignore[method-assign]

    def scatter(self, whole: xp.Array, counts: list[int], out: xp.Array, equal: str) -> Any:
        """Start to sum what is kept of each rank's part."""
        kept = track(xp.unpackbits(self.kept).view(bool), "workspace")
        parts = cut(kept, counts)
        self.own, counts = parts[self.rank], [int(part.sum()) for part in parts]
        whole = track(downcast(whole, out.dtype)[kept], "communication")
        return self.before[0](whole, counts, track(xp.empty(counts[self.rank], out.dtype, out), "communication"), equal)

    def deliver(self, piece: xp.Array) -> None:
        """Bring the sums to their places, with zeros between them."""
        whole = track(xp.zeros(self.own.size, piece.dtype, piece), "communication")
        whole[self.own] = piece
        self.before[1](whole)


def prunable_units(axis: Any, pruner: Pruner) -> list[FSDPUnit]:
    """Return the units of ZeRO 3 that have weights that may be pruned; other layouts have no units."""
    units = getattr(axis, "units", ())
    return [unit for unit in units if any(name in pruner.matrices for name in unit.flat.names)]
