"""What each algorithm must send and how long it takes, from the actual chunk sizes: what traces are compared with.

The volume functions return (messages, elements) that leave `rank`; multiply by the item size for bytes. Where n divides
the size these are the papers' expressions: ring and ordered all-reduce 2 (n-1)/n of the array, which is the least that
any algorithm can send (Patarasuk and Yuan 2009), reduce-scatter and all-gather half of it.

The `_time` functions return seconds on the alpha-beta clock until the last rank is done, when all ranks begin at once
and n divides the size: alpha seconds a message, beta seconds a byte, `nbytes` of the whole array. Adding costs nothing
here.
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
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it: bytes that a link must carry for one byte of array.

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


def binomial_down_time(nbytes: float, ranks: int, alpha: float, beta: float, cut: bool = False) -> float:
    """Binomial broadcast: a rank's messages to its children leave one behind the other, each as soon as the port is free.

    For n = 2^k it is log2 n (alpha + beta nbytes). cut: scatter, where a child gets its subtree's part of `nbytes` only,
    and before it the sizes, 8 B for each rank: log2 n alpha + beta (n-1)/n nbytes and the sizes' bytes.
    """
    arrival = [0.0] * ranks
    for rank in range(ranks):  # a parent has a smaller number
        port = arrival[rank]
        for child in reversed(binomial_tree.children(rank, ranks)):
            below = len(binomial_tree.subtree(child, ranks))
            share = nbytes * below / ranks + (8 * below if below > 1 else 0) if cut else nbytes
            port += beta * share
            arrival[child] = port + alpha
    return max(arrival)


def binomial_up_time(nbytes: float, ranks: int, alpha: float, beta: float, cut: bool = False) -> float:
    """Binomial reduce: a rank receives from its children one after the other, then sends. cut: gather.

    For n = 2^k it is log2 n (alpha + beta nbytes), a gather's log2 n alpha + beta (n-1)/n nbytes.
    """
    ready = [0.0] * ranks
    for rank in reversed(range(ranks)):
        port = 0.0
        for child in binomial_tree.children(rank, ranks):
            share = nbytes * len(binomial_tree.subtree(child, ranks)) / ranks if cut else nbytes
            port = max(ready[child] + alpha + beta * share, port + beta * share)
        ready[rank] = port
    return ready[0]


def _folded_time(
    fold: Fold, before: float, rounds: Sequence[tuple[int, Sequence[float]]], after: float, alpha: float, beta: float
) -> float:
    """Rounds of exchanges between folded numbers v and v xor distance, where v sends bytes[v]; for each folded pair first
    a message of `before` bytes and at the end one of `after`.

    In a power of two all ranks advance together: a round is alpha + beta bytes. Otherwise folded ranks begin later, and an
    exchange ends when the port is through with both directions and the partner's message is there.
    """
    time = [alpha + beta * before if v < fold.extra else 0.0 for v in range(fold.power)]
    port = list(time)  # when the in-port is free
    for distance, sent in rounds:
        partner = [v ^ distance for v in range(fold.power)]
        port = [max(time[w] + alpha + beta * sent[w], port[v] + beta * sent[w], time[v]) for v, w in enumerate(partner)]
        time = [max(port[v], time[v] + beta * sent[v]) for v in range(fold.power)]
    return max([*time, *(time[v] + alpha + beta * after for v in range(fold.extra))])


def _doubling(shares: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Rounds of recursive doubling: what each has, which then grows by what its partner had."""
    rounds, distance, held = [], 1, list(shares)
    while distance < len(shares):
        rounds.append((distance, held))
        held = [held[v] + held[v ^ distance] for v in range(len(held))]
        distance *= 2
    return rounds


def _halving(shares: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Rounds of recursive halving: those of doubling backwards, where each gives what it gets there."""
    return [(d, [held[v ^ d] for v in range(len(held))]) for d, held in reversed(_doubling(shares))]


def recursive_doubling_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """All-reduce: log2 n whole arrays for n = 2^k; at most floor(log2 n) + 2 otherwise."""
    fold = Fold(ranks)
    rounds = [(1 << i, [nbytes] * fold.power) for i in range(floor(log2(ranks)))]
    return _folded_time(fold, nbytes, rounds, nbytes, alpha, beta)


def rabenseifner_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """2 log2 n alpha + 2 (n-1)/n beta nbytes for n = 2^k; at most 2 (alpha + beta nbytes) more than that of q otherwise."""
    fold = Fold(ranks)
    shares = [nbytes / fold.power] * fold.power
    return _folded_time(fold, nbytes, _halving(shares) + _doubling(shares), nbytes, alpha, beta)


def recursive_halving_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Reduce-scatter: log2 n alpha + (n-1)/n beta nbytes for n = 2^k."""
    fold, share = Fold(ranks), nbytes / ranks
    return _folded_time(fold, nbytes, _halving(fold.merge([share] * ranks)), share, alpha, beta)


def doubling_all_gather_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """All-gather: log2 n alpha + (n-1)/n beta nbytes for n = 2^k."""
    fold, share = Fold(ranks), nbytes / ranks
    return _folded_time(fold, share, _doubling(fold.merge([share] * ranks)), nbytes, alpha, beta)


def bruck_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """All-to-all of equal chunks: ceil(log2 n) alpha, and each chunk's bytes once for each one in its distance."""
    ones = sum(i.bit_count() for i in range(ranks))
    return ceil(log2(ranks)) * alpha + beta * ones * nbytes / ranks


def segmented_chain_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Broadcast and reduce: the first of k segments makes n-1 hops, the others follow without a gap."""
    if ranks == 1:
        return 0.0
    first = nbytes / segments(ceil(nbytes))
    return (ranks - 1) * (alpha + beta * first) + beta * (nbytes - first)


def segmented_all_reduce_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """2 (n-1) steps of one chunk. A step takes the chunk's time on the port or, if that is longer, a segment's way."""
    if ranks == 1:
        return 0.0
    chunk = nbytes / ranks
    step = max(beta * chunk, alpha + beta * chunk / segments(ceil(chunk)))
    return (2 * ranks - 3) * step + alpha + beta * chunk


def two_level_time(
    nbytes: float, nodes: int, ranks: int, fast: tuple[float, float], slow: tuple[float, float]
) -> float:
    """Two-level all-reduce of equal nodes; fast, slow: (alpha, beta) inside a node and across. Half of it is that of a
    reduce-scatter or an all-gather."""
    return 2 * steps_time(nbytes, ranks, *fast) + 2 * steps_time(nbytes / ranks, nodes, *slow)


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
    ("broadcast", "binomial"): binomial_down_time,
    ("reduce", "binomial"): binomial_up_time,
    ("all_reduce", "binomial"): lambda nbytes, n, alpha, beta: (
        binomial_up_time(nbytes, n, alpha, beta) + binomial_down_time(nbytes, n, alpha, beta)
    ),
    ("gather", "binomial"): lambda nbytes, n, alpha, beta: binomial_up_time(nbytes, n, alpha, beta, True),
    ("scatter", "binomial"): lambda nbytes, n, alpha, beta: binomial_down_time(nbytes, n, alpha, beta, True),
    ("all_reduce", "recursive_doubling"): recursive_doubling_time,
    ("all_gather", "recursive_doubling"): doubling_all_gather_time,
    ("reduce_scatter", "recursive_halving"): recursive_halving_time,
    ("all_reduce", "rabenseifner"): rabenseifner_time,
    ("all_to_all", "bruck"): bruck_time,
    ("broadcast", "segmented_ring"): segmented_chain_time,
    ("reduce", "segmented_ring"): segmented_chain_time,
    ("all_reduce", "segmented_ring"): segmented_all_reduce_time,
    ("broadcast", "two_level"): binomial_down_time,
    ("reduce", "two_level"): binomial_up_time,
    ("all_gather", "two_level"): steps_time,
    ("reduce_scatter", "two_level"): steps_time,
    ("all_reduce", "two_level"): lambda nbytes, n, alpha, beta: 2 * steps_time(nbytes, n, alpha, beta),
}
