"""What a program or a checkpoint does with shards, in addition to what the core needs of them.

Proved by: tests/parallel/test_zero.py, tests/parallel/test_fully_shard.py
"""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.optim import NORM_BLOCK
from minidist.core.parallel.zero import Shard
from minidist.optim import block_square_sums, check_max_norm, clip_by_norm_, norm_from_blocks


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


def shard_square_sums(
    comm: Comm, shards: Sequence[Shard], skip: Collection[Parameter] = (), equal: str = ""
) -> xp.Array:
    """Return the sums of squares of the whole gradient by blocks of 1,024 elements, in global order, on every rank.

    shards: over the ranks of `comm`, at multiples of 1,024. skip: parameters that do not count, because another group
    of ranks counts them. equal: what every rank must pass equal. Each rank sends the float64 sums of its blocks
    (8 B each) to all others, under purpose `clip_norm`.
    """
    # The sums of each rank over the blocks of its shard, shard after shard.
    sums = []
    for shard in shards:
        gradient = shard.grad_buffer() if shard.filled else xp.zeros(shard.size, shard.dtype, shard.data)
        flat = shard.flat
        sums.append(block_square_sums(gradient, [shard.place(flat.slice_of(p)) for p in flat.parameters if p in skip]))

    # One all-gather brings those of all shards; a unit's blocks are in order when its ranks' parts follow each other.
    with purpose("clip_norm"):
        gathered = all_gather(comm, xp.concatenate(sums), equal=equal).reshape(comm.size, -1)

    # (ranks, blocks of all shards) -> unit by unit, rank by rank: the order of the blocks on one device.
    blocks, start = [], 0
    for part in sums:
        blocks.append(gathered[:, start : start + part.size].reshape(-1))
        start += part.size
    return xp.concatenate(blocks)


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
