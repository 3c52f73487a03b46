"""How long each algorithm takes on the alpha-beta clock: what the virtual time of its traces is compared with, and
`auto` uses.

Seconds until the last rank is done, when all ranks begin at once and n divides the size: alpha seconds a message, beta
seconds a byte, `nbytes` of the whole array. Adding costs nothing here. Where the papers' conditions hold (n a power of
two) these are the papers' expressions.
"""

from collections.abc import Callable, Sequence
from math import ceil, floor, log2

from minidist.collectives import binomial_tree
from minidist.collectives.folding import Fold
from minidist.collectives.segmented_ring import segments


def barrier_time(ranks: int, alpha: float) -> float:
    """One latency a round."""
    return alpha * ceil(log2(ranks))


def rounds_time(
    rounds: Sequence[tuple[Sequence[int], Sequence[float]]], alpha: float, beta: float, buffered: bool = False
) -> float:
    """Rounds of `sendrecv` in which rank v sends sent[v] bytes to rank to[v], for chunks of any sizes: (to, sent) of
    each round.

    A rank goes on when its message has landed and its own is out: with synchronous sends no earlier than its receiver
    came.
    """
    ranks = len(rounds[0][0]) if rounds else 1
    time, port = [0.0] * ranks, [0.0] * ranks
    for to, sent in rounds:
        source = [to.index(v) for v in range(ranks)]
        port = [max(time[w] + alpha + beta * sent[w], port[v] + beta * sent[w], time[v]) for v, w in enumerate(source)]
        time = [max(port[v], time[v] + beta * sent[v], 0.0 if buffered else time[to[v]]) for v in range(ranks)]
    return max(time)


def _ring(sizes: Sequence[float], first: int) -> list[tuple[list[int], list[float]]]:
    """n-1 rounds to the right neighbour; in the first one rank v sends chunk v + first."""
    n = len(sizes)
    return [
        ([(v + 1) % n for v in range(n)], [sizes[(v + first - step) % n] for v in range(n)]) for step in range(n - 1)
    ]


def ragged_ring_reduce_scatter_time(sizes: Sequence[float], alpha: float, beta: float) -> float:
    """sizes: bytes of each rank's chunk. For equal chunks `steps_time`."""
    return rounds_time(_ring(sizes, -1), alpha, beta)


def ragged_ring_all_gather_time(sizes: Sequence[float], alpha: float, beta: float) -> float:
    """The same walk; rank v begins with its own chunk."""
    return rounds_time(_ring(sizes, 0), alpha, beta)


def ragged_ring_all_reduce_time(sizes: Sequence[float], alpha: float, beta: float) -> float:
    """One walk after the other, without a pause."""
    return rounds_time(_ring(sizes, -1) + _ring(sizes, 0), alpha, beta)


def ragged_pairwise_time(rows: Sequence[Sequence[float]], alpha: float, beta: float, buffered: bool = False) -> float:
    """rows[v][w]: bytes from rank v to rank w."""
    n = len(rows)
    rounds = [([(v + s) % n for v in range(n)], [rows[v][(v + s) % n] for v in range(n)]) for s in range(1, n)]
    return rounds_time(rounds, alpha, beta, buffered)


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
    """Binomial broadcast: a rank's messages to its children leave one behind the other, each as soon as the port is
    free.

    For n = 2^k it is log2 n (alpha + beta nbytes). cut: scatter, where a child gets its subtree's part of `nbytes`
    only,
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
    fold: Fold,
    before: Sequence[float],
    rounds: Sequence[tuple[int, Sequence[float]]],
    after: Sequence[float],
    alpha: float,
    beta: float,
) -> float:
    """Rounds of exchanges between folded numbers v and v xor distance, where v sends bytes[v]; for each folded pair
    first a message of before[v] bytes and at the end one of after[v].

    In a power of two all ranks advance together: a round is alpha + beta bytes. Otherwise folded ranks begin later, and
    an exchange ends when the port is through with both directions and the partner's message is there.
    """
    time = [alpha + beta * before[v] if v < fold.extra else 0.0 for v in range(fold.power)]
    port = list(time)  # when the in-port is free
    for distance, sent in rounds:
        partner = [v ^ distance for v in range(fold.power)]
        port = [max(time[w] + alpha + beta * sent[w], port[v] + beta * sent[w], time[v]) for v, w in enumerate(partner)]
        time = [max(port[v], time[v] + beta * sent[v]) for v in range(fold.power)]
    return max([*time, *(time[v] + alpha + beta * after[v] for v in range(fold.extra))])


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
    rounds, whole = [(1 << i, [nbytes] * fold.power) for i in range(floor(log2(ranks)))], [nbytes] * fold.extra
    return _folded_time(fold, whole, rounds, whole, alpha, beta)


def rabenseifner_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """2 log2 n alpha + 2 (n-1)/n beta nbytes for n = 2^k; at most 2 (alpha + beta nbytes) more than that of q
    otherwise.
    """
    power = Fold(ranks).power
    return ragged_rabenseifner_time([nbytes / power] * power, ranks, alpha, beta)


def ragged_rabenseifner_time(shares: Sequence[float], ranks: int, alpha: float, beta: float) -> float:
    """shares: bytes of each folded number's chunk."""
    fold, whole = Fold(ranks), [sum(shares)] * ranks
    return _folded_time(fold, whole, _halving(shares) + _doubling(shares), whole, alpha, beta)


def recursive_halving_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Reduce-scatter: log2 n alpha + (n-1)/n beta nbytes for n = 2^k."""
    return ragged_halving_time([nbytes / ranks] * ranks, alpha, beta)


def ragged_halving_time(sizes: Sequence[float], alpha: float, beta: float) -> float:
    """sizes: bytes of each rank's chunk."""
    fold = Fold(len(sizes))
    return _folded_time(
        fold, [sum(sizes)] * fold.extra, _halving(fold.merge(sizes)), sizes[: 2 * fold.extra : 2], alpha, beta
    )


def doubling_all_gather_time(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """All-gather: log2 n alpha + (n-1)/n beta nbytes for n = 2^k."""
    return ragged_doubling_time([nbytes / ranks] * ranks, alpha, beta)


def ragged_doubling_time(sizes: Sequence[float], alpha: float, beta: float) -> float:
    """sizes: bytes of each rank's shard."""
    fold = Fold(len(sizes))
    return _folded_time(
        fold, sizes[: 2 * fold.extra : 2], _doubling(fold.merge(sizes)), [sum(sizes)] * fold.extra, alpha, beta
    )


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
    ("all_to_all", "linear"): ordered_reduce_scatter_time,
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
