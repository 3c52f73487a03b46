"""What each algorithm must send, from the actual chunk sizes: the numbers that recorded traces are compared with.

Each function returns (messages, elements) that leave `rank`. Multiply by the item size for bytes. Where n divides the size
these are the papers' expressions: ring and ordered all-reduce 2 (n-1)/n elements, reduce-scatter and all-gather half of it.
"""

from collections.abc import Sequence

from minidist.base.layout import chunk_sizes


def reduce_scatter(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Ring and ordered: everything but the rank's own chunk."""
    return len(sizes) - 1, sum(sizes) - sizes[rank]


def all_gather(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Ring: everything but the chunk of the next rank."""
    return len(sizes) - 1, sum(sizes) - sizes[(rank + 1) % len(sizes)]


def all_reduce(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Ring and ordered: a reduce-scatter and an all-gather."""
    sizes = chunk_sizes(size, ranks)
    (messages, elements), (more_messages, more_elements) = reduce_scatter(sizes, rank), all_gather(sizes, rank)
    return messages + more_messages, elements + more_elements


def broadcast(size: int, ranks: int, rank: int, root: int = 0) -> tuple[int, int]:
    """Naive: all from the root."""
    return (ranks - 1, (ranks - 1) * size) if rank == root else (0, 0)
