"""What a program or a checkpoint does with shards, in addition to what the core needs of them.

Proved by: tests/parallel/test_zero.py, tests/parallel/test_fully_shard.py
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError, quoted
from minidist.core.comm import Comm
from minidist.core.optim import NORM_BLOCK, check_max_norm, clip_by_norm_, norm_from_blocks
from minidist.core.parallel.flat_shards import Shard, shard_square_sums


def seen_from(shard: Shard, comm: Comm) -> Shard:
    """Return the shard that rank `comm.rank` has of the unit; its arrays have the shapes, and not the values."""
    other = copy(shard)
    other.comm, other.start, other.stop = comm, comm.rank * shard.size, (comm.rank + 1) * shard.size
    return other


def ranges(shard: Shard) -> list[tuple[Parameter, slice, int, int]]:
    """Return (parameter, place in the shard, start, stop in the flattened parameter), frozen ones included."""
    result = []
    for parameter in shard.flat.parameters:
        # A shard boundary may cut a parameter; its part in another shard is that rank's.
        whole = shard.flat.slice_of(parameter)
        place = shard.place(whole)
        if place.stop > place.start:
            start = place.start + shard.start - whole.start
            result.append((parameter, place, start, start + place.stop - place.start))
    return result


def state_ranges(shard: Shard) -> list[tuple[Parameter, int, int]]:
    """Return (parameter, start, stop in the flattened parameter) of the state of an optimizer on `shard.slices()`."""
    mine = [(parameter, start, stop) for parameter, _, start, stop in ranges(shard) if parameter.requires_grad]
    return mine or [(p, 0, 0) for p in shard.flat.parameters if p.requires_grad][:1]


def clip_shards_(comm: Comm, shards: Sequence[Shard], max_norm: float, optimizer: Any = None) -> float:
    """Scale the sharded gradients so that their global norm is at most `max_norm`; every rank returns the norm before.

    See `shard_square_sums`; every rank adds the sums in the global order, unit by unit. optimizer: as for
    `optim.clip_by_norm_`, for gradients in half precision. Raises UsageError when blocks of the norm cross shard
    boundaries, or the shards lie on other ranks than those of `comm`: blocks would count twice, or not at all.
    """
    check_max_norm(max_norm)
    for shard in shards:
        if shard.alignment % NORM_BLOCK:
            raise UsageError(
                f"clipping needs shards that begin at multiples of {NORM_BLOCK} elements, these begin at multiples of "
                f"{shard.alignment}; build them with alignment={NORM_BLOCK}"
            )
        if shard.comm is not comm and list(shard.comm.members) != list(comm.members):
            raise UsageError(
                f"rank {comm.members[comm.rank]}: the norm is taken over ranks {quoted(list(comm.members))}, but the"
                f" unit of {shard.flat.names[0]!r} has its shards on ranks {quoted(list(shard.comm.members))}; pass the"
                " communicator over which it is sharded (of a mesh of two axes the second one)"
            )
    sums = shard_square_sums(comm, shards, equal=f"max_norm {float(max_norm):g}")
    return clip_by_norm_(list(shards), norm_from_blocks(sums), max_norm, optimizer)
