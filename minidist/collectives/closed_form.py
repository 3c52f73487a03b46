"""What each algorithm must send and how long it takes, from the actual chunk sizes: what traces are compared with.

The volume functions return (messages, elements) that leave `rank`; multiply by the item size for bytes. Where n divides
the size these are the papers' expressions: ring and ordered all-reduce 2 (n-1)/n of the array, which is the least that
any algorithm can send (Patarasuk and Yuan 2009), reduce-scatter and all-gather half of it.

The `_time` functions return seconds on the alpha-beta clock until the last rank is done, when all ranks begin at once
and n divides the size: alpha seconds a message, beta seconds a byte, `nbytes` of the whole array. Adding costs nothing
here.
"""

from collections.abc import Callable, Sequence
from math import ceil, log2

from minidist.base.layout import chunk_sizes

Volume = tuple[int, int]  # messages, elements


def _sum(*parts: Volume) -> Volume:
    return sum(messages for messages, _ in parts), sum(elements for _, elements in parts)


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
}


def barrier_time(ranks: int, alpha: float) -> float:
    """One latency a round."""
    return alpha * ceil(log2(ranks))


def steps_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """n-1 steps of one chunk each: ring reduce-scatter, ring all-gather, pairwise all-to-all."""
    return (ranks - 1) * (alpha + beta * nbytes / ranks)


def ordered_reduce_scatter_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """All n-1 chunks leave one after the other and nobody waits in between: one latency for all."""
    return alpha + (ranks - 1) * beta * nbytes / ranks if ranks > 1 else 0.0


def fan_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """n-1 messages of `nbytes` each through one port: naive broadcast, reduce, and gather, scatter of such shards."""
    return alpha + (ranks - 1) * beta * nbytes if ranks > 1 else 0.0


def chain_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """n-1 messages of `nbytes`, each after the one before: ring broadcast and reduce."""
    return (ranks - 1) * (alpha + beta * nbytes)


# The same table in seconds: (nbytes of the whole array, ranks, alpha, beta) -> seconds.
TIMES: dict[tuple[str, str], Callable[[float, int, float, float], float]] = {
    ("broadcast", "naive"): fan_time,
    ("broadcast", "ring"): chain_time,
    ("reduce", "naive"): fan_time,
    ("reduce", "ring"): chain_time,
    ("gather", "naive"): lambda nbytes, n, alpha, beta: fan_time(nbytes / n, n, alpha, beta),
    ("scatter", "naive"): lambda nbytes, n, alpha, beta: fan_time(nbytes / n, n, alpha, beta),
    ("all_gather", "naive"): lambda nbytes, n, alpha, beta: (
        fan_time(nbytes / n, n, alpha, beta) + fan_time(nbytes, n, alpha, beta)
    ),
    ("all_gather", "ring"): steps_time,
    ("reduce_scatter", "naive"): lambda nbytes, n, alpha, beta: (
        fan_time(nbytes, n, alpha, beta) + fan_time(nbytes / n, n, alpha, beta)
    ),
    ("reduce_scatter", "ring"): steps_time,
    ("reduce_scatter", "ordered"): ordered_reduce_scatter_time,
    ("all_reduce", "naive"): lambda nbytes, n, alpha, beta: 2 * fan_time(nbytes, n, alpha, beta),
    ("all_reduce", "ring"): lambda nbytes, n, alpha, beta: 2 * steps_time(nbytes, n, alpha, beta),
    ("all_reduce", "ordered"): lambda nbytes, n, alpha, beta: (
        ordered_reduce_scatter_time(nbytes, n, alpha, beta) + steps_time(nbytes, n, alpha, beta)
    ),
    ("all_to_all", "pairwise"): steps_time,
}
