"""Which tokens of a split sequence a rank holds, for each kind of attention.

    contiguous (Ulysses)         | 0 0 | 1 1 | 2 2 | 3 3 |
    zigzag/2 (Ulysses x ring)    | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |     2 neighbours share the part of a ring of 2

Zig-zag, the order of ring attention and all-gather attention, is in core/parallel/context_parallel.py.

Proved by: tests/parallel/test_context.py, tests/parallel/test_ulysses_ring.py
"""

from minidist.base.errors import UsageError, nearest, quoted
from minidist.core.base import arrays as xp
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.parallel.context_parallel import zigzag_positions

ORDERS = ("zigzag", "contiguous")


def sequence_positions(length: int, rank: int, ranks: int, order: str = "zigzag") -> xp.Array:
    """Return the global positions, rising, of the tokens that `rank` of `ranks` holds. Ragged lengths are fine.

    order: "zigzag", "contiguous", or "zigzag/2" for groups of 2 neighbours that share the part of a smaller ring.

    Raises UsageError when there are fewer tokens than ranks.
    """
    zigzag = zigzag_positions(length, rank, ranks)
    if order == "zigzag":
        return zigzag

    # Ulysses x ring: a group of neighbours holds what a rank of a smaller ring holds, each a consecutive part of it.
    whole, _, neighbours = order.partition("/")
    if neighbours.isdecimal() and int(neighbours) > 0 and ranks % int(neighbours) == 0:
        near = int(neighbours)
        group = sequence_positions(length, rank // near, ranks // near, whole)
        starts = offsets(chunk_sizes(len(group), near))
        return group[starts[rank % near] : starts[rank % near + 1]]
    if order == "contiguous":
        starts = offsets(chunk_sizes(length, ranks))
        return xp.device_arange(starts[rank], starts[rank + 1])
    raise UsageError(f"unknown order {quoted(order)} of a sequence{nearest(order, ORDERS)}; one of {', '.join(ORDERS)}")


def part_order(attention: str, ulysses: int = 1) -> str:
    """Return the order of the parts that an attention needs: "ring", "all-gather", "ulysses" or "ulysses-ring".

    ulysses: of the last, how many neighbours exchange heads.
    """
    if attention == "ulysses-ring":
        return f"zigzag/{ulysses}"
    return "contiguous" if attention == "ulysses" else "zigzag"
