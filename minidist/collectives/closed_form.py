"""What each algorithm must send and how long it takes, from the actual chunk sizes: what traces are compared with.

The volume functions return (messages, elements) that leave `rank`; multiply by the item size for bytes. Where n divides
the size these are the papers' expressions: ring and ordered all-reduce 2 (n-1)/n of the array, which is the least that
any algorithm can send (Patarasuk and Yuan 2009), reduce-scatter and all-gather half of it.

How long it takes is in `virtual_time`.
"""

from collections.abc import Callable, Sequence
from math import ceil, floor, log2

from minidist.base.layout import chunk_sizes
from minidist.collectives import binomial_tree
from minidist.collectives.folding import Fold
from minidist.collectives.segmented_ring import segments

Volume = tuple[int, int]  # messages, elements


def _sum(*parts: Volume) -> Volume:
    return sum(messages for messages, _ in parts), sum(elements for _, elements in parts)


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it: bytes that a link must carry for one byte of
    array.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def barrier(ranks: int) -> Volume:
    """Dissemination: an empty message a round."""
    return (ceil(log2(ranks)), 0)


def reduce_scatter(sizes: Sequence[int], rank: int) -> Volume:
    """Ring and ordered: everything but the rank's own chunk."""
    return len(sizes) - 1, sum(sizes) - sizes[rank]


def all_gather(sizes: Sequence[int], rank: int) -> Volume:
    """Ring: everything but the chunk of the next rank."""
    return len(sizes) - 1, sum(sizes) - sizes[(rank + 1) % len(sizes)]


def all_reduce(size: int, ranks: int, rank: int) -> Volume:
    """Ring and ordered: a reduce-scatter and an all-gather."""
    sizes = chunk_sizes(size, ranks)
    return _sum(reduce_scatter(sizes, rank), all_gather(sizes, rank))


def broadcast(size: int, ranks: int, rank: int, root: int = 0) -> Volume:
    """Naive: all from the root."""
    return (ranks - 1, (ranks - 1) * size) if rank == root else (0, 0)


def chain_broadcast(size: int, ranks: int, rank: int, root: int = 0) -> Volume:
    """Ring: every rank but the last hands the whole on."""
    return (0, 0) if (rank - root) % ranks == ranks - 1 else (1, size)


def reduce(size: int, ranks: int, rank: int, root: int = 0) -> Volume:
    """Naive and ring: everybody but the root sends one whole array."""
    return (0, 0) if rank == root else (1, size)


def gather(sizes: Sequence[int], rank: int, root: int = 0) -> Volume:
    """Naive: everybody but the root sends its shard."""
    return (0, 0) if rank == root else (1, sizes[rank])


def scatter(sizes: Sequence[int], rank: int, root: int = 0) -> Volume:
    """Naive: the root sends each rank its chunk."""
    return (len(sizes) - 1, sum(sizes) - sizes[root]) if rank == root else (0, 0)


def all_to_all(send_sizes: Sequence[int], rank: int) -> Volume:
    """Pairwise: everything but what stays."""
    return len(send_sizes) - 1, sum(send_sizes) - send_sizes[rank]


def binomial_broadcast(size: int, ranks: int, rank: int, root: int = 0) -> Volume:
    """The whole to each child; the root has ceil(log2 n)."""
    children = len(binomial_tree.children((rank - root) % ranks, ranks))
    return children, children * size


def _subtree_size(sizes: Sequence[int], number: int, root: int) -> int:
    n = len(sizes)
    return sum(sizes[(root + v) % n] for v in binomial_tree.subtree(number, n))


def binomial_gather(sizes: Sequence[int], rank: int, root: int = 0) -> Volume:
    """The shards of the rank's subtree, in one message."""
    return (0, 0) if rank == root else (1, _subtree_size(sizes, (rank - root) % len(sizes), root))


def binomial_scatter(sizes: Sequence[int], rank: int, root: int = 0) -> Volume:
    """To each child the chunks of its subtree and, unless it is a leaf, their sizes (counted as elements of 8 B)."""
    n, messages, elements = len(sizes), 0, 0
    for child in binomial_tree.children((rank - root) % n, n):
        below = len(binomial_tree.subtree(child, n))
        messages += 1 + (below > 1)
        elements += _subtree_size(sizes, child, root) + (below if below > 1 else 0)
    return messages, elements


def recursive_doubling_all_reduce(size: int, ranks: int, rank: int) -> Volume:
    """The whole array in each of floor(log2 n) rounds; a folded pair: the whole there and back."""
    fold = Fold(ranks)
    messages = 1 if fold.gives(rank) else floor(log2(ranks)) + fold.takes(rank)
    return messages, messages * size


def recursive_doubling_all_gather(sizes: Sequence[int], rank: int) -> Volume:
    """What is known so far, in each of floor(log2 n) rounds; a folded pair: its shard there, the whole back."""
    fold = Fold(len(sizes))
    if fold.gives(rank):
        return 1, sizes[rank]
    merged, me, rounds = fold.merge(sizes), fold.number(rank), fold.power.bit_length() - 1
    known = [sum(merged[me >> i << i : (me >> i << i) + (1 << i)]) for i in range(rounds)]
    return rounds + fold.takes(rank), sum(known) + fold.takes(rank) * sum(sizes)


def recursive_halving_reduce_scatter(sizes: Sequence[int], rank: int) -> Volume:
    """All but the (folded) own chunk in floor(log2 n) rounds; a folded pair: the whole there, one chunk back."""
    fold = Fold(len(sizes))
    if fold.gives(rank):
        return 1, sum(sizes)
    given = sum(sizes) - fold.merge(sizes)[fold.number(rank)]
    return fold.power.bit_length() - 1 + fold.takes(rank), given + (sizes[rank - 1] if fold.takes(rank) else 0)


def rabenseifner(size: int, ranks: int, rank: int) -> Volume:
    """Halving gives away all but the own chunk of q; doubling sends what is known; a folded pair: the whole, twice."""
    fold = Fold(ranks)
    if fold.gives(rank):
        return 1, size
    chunks, me = chunk_sizes(size, fold.power), fold.number(rank)
    both = _sum(recursive_halving_reduce_scatter(chunks, me), recursive_doubling_all_gather(chunks, me))
    return _sum(both, (1, size)) if fold.takes(rank) else both


def bruck_all_to_all(rows: Sequence[Sequence[int]], rank: int, counted: bool) -> Volume:
    """rows[r][j]: elements from rank r to rank j. The chunk that must go i ranks far is sent once for each one in i.

    counted: the sizes of the chunks go ahead of them (8 B each), because not all are equal.
    """
    n, messages, elements, distance = len(rows), 0, 0, 1
    while distance < n:
        moving = [i for i in range(n) if i & distance]
        for i in moving:
            origin = (rank - i % distance) % n  # it has made its smaller hops
            elements += rows[origin][(origin + i) % n]
        messages, elements, distance = messages + 1 + counted, elements + counted * len(moving), 2 * distance
    return messages, elements


def segmented_broadcast(size: int, ranks: int, rank: int, root: int = 0, itemsize: int = 8) -> Volume:
    """Every rank but the last hands the whole on, in segments."""
    messages, elements = chain_broadcast(size, ranks, rank, root)
    return messages * segments(size * itemsize), elements


def segmented_reduce(size: int, ranks: int, rank: int, root: int = 0, itemsize: int = 8) -> Volume:
    """Every rank but the root hands one whole array on, in segments."""
    messages, elements = reduce(size, ranks, rank, root)
    return messages * segments(size * itemsize), elements


def segmented_all_reduce(size: int, ranks: int, rank: int, itemsize: int = 8) -> Volume:
    """The ring's volume, every chunk in as many segments as the largest one needs."""
    messages, elements = all_reduce(size, ranks, rank)
    return messages * segments(chunk_sizes(size, ranks)[0] * itemsize), elements


def two_level_all_reduce(size: int, nodes: int, ranks: int, node: int, rank: int) -> tuple[Volume, Volume]:
    """Inside its node and across, of rank `rank` of node `node`, with equal nodes of `ranks` ranks."""
    sizes = chunk_sizes(size, ranks)
    return _sum(reduce_scatter(sizes, rank), all_gather(sizes, rank)), all_reduce(sizes[rank], nodes, node)


def two_level_reduce_scatter(sizes: Sequence[Sequence[int]], node: int, rank: int) -> tuple[Volume, Volume]:
    """The same of a reduce-scatter; sizes[m][l]: the chunk of rank l of node m."""
    places = [sum(place) for place in zip(*sizes, strict=True)]
    return reduce_scatter(places, rank), reduce_scatter([row[rank] for row in sizes], node)


def two_level_all_gather(sizes: Sequence[Sequence[int]], node: int, rank: int) -> tuple[Volume, Volume]:
    """The same of an all-gather."""
    places = [sum(place) for place in zip(*sizes, strict=True)]
    return all_gather(places, rank), all_gather([row[rank] for row in sizes], node)


def _naive_all_gather(sizes: Sequence[int], rank: int) -> Volume:
    return _sum(gather(sizes, rank), broadcast(sum(sizes), len(sizes), rank))


def _naive_reduce_scatter(sizes: Sequence[int], rank: int) -> Volume:
    return _sum(reduce(sum(sizes), len(sizes), rank), scatter(sizes, rank))


def _naive_all_reduce(size: int, ranks: int, rank: int) -> Volume:
    return _sum(reduce(size, ranks, rank), broadcast(size, ranks, rank))


# operation, algorithm -> its function above. A new algorithm needs a line here, or the tests fail.
VOLUMES: dict[tuple[str, str], Callable[..., Volume]] = {
    ("broadcast", "naive"): broadcast,
    ("broadcast", "ring"): chain_broadcast,
    ("reduce", "naive"): reduce,
    ("reduce", "ring"): reduce,
    ("gather", "naive"): gather,
    ("scatter", "naive"): scatter,
    ("all_gather", "naive"): _naive_all_gather,
    ("all_gather", "ring"): all_gather,
    ("reduce_scatter", "naive"): _naive_reduce_scatter,
    ("reduce_scatter", "ring"): reduce_scatter,
    ("reduce_scatter", "ordered"): reduce_scatter,
    ("all_reduce", "naive"): _naive_all_reduce,
    ("all_reduce", "ring"): all_reduce,
    ("all_reduce", "ordered"): all_reduce,
    ("all_to_all", "pairwise"): all_to_all,
    ("all_to_all", "linear"): all_to_all,
    ("broadcast", "binomial"): binomial_broadcast,
    ("reduce", "binomial"): reduce,
    ("all_reduce", "binomial"): lambda size, ranks, rank: _sum(
        reduce(size, ranks, rank), binomial_broadcast(size, ranks, rank)
    ),
    ("gather", "binomial"): binomial_gather,
    ("scatter", "binomial"): binomial_scatter,
    ("all_reduce", "recursive_doubling"): recursive_doubling_all_reduce,
    ("all_gather", "recursive_doubling"): recursive_doubling_all_gather,
    ("reduce_scatter", "recursive_halving"): recursive_halving_reduce_scatter,
    ("all_reduce", "rabenseifner"): rabenseifner,
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("broadcast", "segmented_ring"): segmented_broadcast,
    ("reduce", "segmented_ring"): segmented_reduce,
    ("all_reduce", "segmented_ring"): segmented_all_reduce,
    # With all ranks in one node: what it is without nodes. For several see the functions above.
    ("broadcast", "two_level"): binomial_broadcast,
    ("reduce", "two_level"): reduce,
    ("all_gather", "two_level"): all_gather,
    ("reduce_scatter", "two_level"): reduce_scatter,
    ("all_reduce", "two_level"): all_reduce,
}
