"""How each layout leaves pruned entries out of its reductions of gradients.

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
from minidist.core.base.layout import cut
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.base.watchers import track
from minidist.core.collectives import all_gather, reduce_scatter
from minidist.core.comm import Comm, Work
from minidist.core.parallel.flat_shards import Shard
from minidist.core.parallel.fsdp_unit import FSDPUnit, Reduce
from minidist.core.parallel.gradients import Bucket
from minidist.core.parallel.zero import ShardReducer
from minidist.parallel.comm_hooks import Then
from minidist.parallel.compressor import compress
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
        ddp.register_comm_hook(KeptEntries(ddp.comm, pruner, "sum", ddp.reducer.algorithm), compress)
    elif hasattr(axis, "zero"):
        reducer = axis.zero.reducer
        reducer.replace_communication(partial(scatter_kept, reducer, pruner.kept))


def scatter_kept(reducer: ShardReducer, kept_of: Callable[[Bucket], xp.Array], bucket: Bucket) -> Then:
    """Start to send each owner the sum of what is kept of its part of a bucket; what is left out becomes zero.

    kept_of: (bucket) -> which elements of it (bool), the same on all ranks.
    """
    array, mine, counts = reducer.take(bucket)
    parts = cut(kept := kept_of(bucket), counts)
    own, counts = parts[reducer.comm.rank], [int(part.sum()) for part in parts]
    array = track(array[kept], "communication")
    out = track(xp.empty(counts[reducer.comm.rank], array.dtype, array), "communication")
    work = reducer.scatter(bucket, array, counts, out)
    first = not reducer.shard.filled

    def spread(values: xp.Array) -> xp.Array:
        whole = mine if first else track(xp.empty(own.size, values.dtype, values), "communication")
        whole[...] = 0
        whole[own] = values
        return whole

    return Then(work, spread)


def exchange_masks(axis: Any, pruner: Pruner) -> None:
    """Let every unit of ZeRO 3 with weights that may be pruned reduce the kept ones alone: its ranks exchange masks.

    Purpose `pruning`. Other layouts know the masks of all ranks.
    """
    for unit in prunable_units(axis, pruner):
        mine = xp.ones(unit.shard.size, bool, unit.shard.data)
        for p, place, _, _ in unit.shard.ranges():
            if p.name in pruner.masks:
                mine[place] = pruner.masks[p.name].values
        with purpose("pruning"):
            unit.reduce = ReduceKept(unit, mine)


class ReduceKept(Reduce):
    """Reduces only some elements of a unit; the others' gradients become zero. mine: which of this rank's shard (bool).

    Every rank needs the bits of all shards, to leave out what their owners do: an all-gather of 1/8 B per element.
    """

    def __init__(self, unit: FSDPUnit, mine: xp.Array) -> None:
        before = unit.reduce
        super().__init__(before.op, before.algorithm, before.replicas, before.find_unused)
        self.kept = track(all_gather(unit.shard.comm, xp.packbits(mine)), "optimizer")
        self.own = mine  # of the reduction in flight: the elements of the shard that it brings

    def start(self, shard: Shard, whole: xp.Array, out: xp.Array, equal: str) -> Work:
        kept = track(xp.unpackbits(self.kept).view(bool), "workspace")
        parts = cut(kept, [shard.size] * shard.comm.size)
        self.own, counts = parts[shard.comm.rank], [int(part.sum()) for part in parts]
        whole = track(whole[kept], "communication")
        out = track(xp.empty(counts[shard.comm.rank], out.dtype, out), "communication")
        work: Work = reduce_scatter(
            shard.comm, whole, self.op, counts=counts, algorithm=self.algorithm, out=out, async_op=True, equal=equal
        )
        return work

    def finish(self, piece: xp.Array, equal: str) -> xp.Array:
        sums = super().finish(piece, equal)
        whole = track(xp.zeros(self.own.size, sums.dtype, sums), "communication")
        whole[self.own] = sums
        return whole


def prunable_units(axis: Any, pruner: Pruner) -> list[FSDPUnit]:
    """Return the units of ZeRO 3 that have weights that may be pruned; other layouts have no units."""
    units = getattr(axis, "units", ())
    return [unit for unit in units if any(name in pruner.matrices for name in unit.flat.names)]
