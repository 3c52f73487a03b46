"""How each layout leaves pruned entries out of its reductions of gradients.

    replicas    buckets of whole parameters are all-reduced: a hook sends what is kept       `KeptEntries`
    ZeRO 1, 2   buckets are reduce-scattered: each owner's part shrinks to what is kept      `ShardReducer.keep_only`
    ZeRO 3      units are reduce-scattered: ranks exchange the masks of their shards first   `FSDPParamGroup.keep_only`

A data axis is known here by what it has: replicas a `parallel`, ZeRO 1 and 2 a `zero`, ZeRO 3 `units`; one device has
nothing to reduce.

Proved by: tests/techniques/test_pruning.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.base import arrays as xp
from minidist.base.trace import purpose
from minidist.comm import Comm
from minidist.parallel.compressor import compress
from minidist.parallel.fsdp_param_group import FSDPParamGroup
from minidist.techniques.pruning.pruner import KeptEntries, Part, Pruner


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
        axis.zero.reducer.keep_only(pruner.kept)


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
            unit.keep_only(mine)


def prunable_units(axis: Any, pruner: Pruner) -> list[FSDPParamGroup]:
    """Return the units of ZeRO 3 that have weights that may be pruned; other layouts have no units."""
    units = getattr(axis, "units", ())
    return [unit for unit in units if any(name in pruner.matrices for name in unit.flat.names)]
