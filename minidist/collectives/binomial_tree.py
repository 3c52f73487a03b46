"""The binomial tree: in each round every rank that has the message passes it on, so the number of holders doubles.

Broadcast from rank 0 over 8 ranks; a rank's parent is its number with the lowest bit that is set cleared:

    round 1    0 ────────────▶ 4                                    0
    round 2    0 ────▶ 2       4 ────▶ 6                         ┌──┼────┐
    round 3    0 ▶ 1   2 ▶ 3   4 ▶ 5   6 ▶ 7                     4  2    1
                                                                6 5 3
                                                                7
Reduce and gather are the same tree with the arrows turned round; a subtree is a range of ranks, so gather and scatter
move ranges. The latency grows with log2 n; each message is the whole array, so long ones are better cut (see
`segmented_ring`, `recursive_halving`). All-reduce is a reduce and a broadcast. Another root: the ranks are counted from
it.

Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19 (2005).
Proved by: tests/collectives/test_collectives.py, tests/collectives/test_papers.py
"""

from collections.abc import Sequence

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import offsets
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.comm.communicator import PointToPoint


def lowest_bit(number: int, ranks: int) -> int:
    """Return the lowest bit set in a rank's distance from the root; for the root the first power of two >= ranks."""
    return number & -number if number else 1 << (ranks - 1).bit_length()


def children(number: int, ranks: int) -> list[int]:
    """Return a rank's children, nearest first (all as distances from the root)."""
    # Below the lowest bit set of `number` each bit gives one child; a child beyond the last rank does not exist.
    bit, result = 1, []
    while bit < lowest_bit(number, ranks) and number + bit < ranks:
        result.append(number + bit)
        bit *= 2
    return result


def subtree(number: int, ranks: int) -> range:
    """Return a rank and all below it, which are a range."""
    return range(number, min(number + lowest_bit(number, ranks), ranks))


# --- what it sends and how long it takes; ranks and sizes count from the root ---


def broadcast_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what a broadcast sends: the whole array to each child; the root has ceil(log2 n) of them."""
    messages = len(children(rank, len(sizes)))
    return messages, messages * sum(sizes)


def scatter_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what a scatter sends: to each child its subtree's chunks and, unless it is a leaf, their sizes of 8 B."""
    n, messages, elements = len(sizes), 0, 0
    for child in children(rank, n):
        below = subtree(child, n)
        messages += 1 + (len(below) > 1)
        elements += sum(sizes[v] for v in below) + (len(below) if len(below) > 1 else 0)
    return messages, elements


def down_seconds(
    nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0, cut: bool = False
) -> float:
    """Return the seconds of a broadcast: log2 n (alpha + beta nbytes) for n = 2^k.

    Messages to the children leave one behind the other.

    cut: scatter, where a child gets its subtree's part of `nbytes` only, and before it the sizes, 8 B per rank:
    log2 n alpha + beta (n-1)/n nbytes and the sizes' bytes.
    """
    # arrival[v]: when v has received everything. port: when v's out-port is free again.
    arrival = [0.0] * ranks
    for rank in range(ranks):  # a parent has a smaller number
        port = arrival[rank]
        for child in reversed(children(rank, ranks)):
            below = len(subtree(child, ranks))
            share = nbytes * below / ranks + (8 * below if below > 1 else 0) if cut else nbytes
            messages = 2 if cut and below > 1 else 1
            port += beta * share + messages * overhead
            arrival[child] = port + alpha - overhead
    return max(arrival)


def up_seconds(nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0, cut: bool = False) -> float:
    """Return the seconds of a reduce, for n = 2^k those of a broadcast.

    A rank receives from its children one after the other, then sends.

    cut: gather, log2 n alpha + beta (n-1)/n nbytes for n = 2^k.
    """
    # ready[v]: when v holds the sum of its subtree. port: when v's in-port is free again.
    ready = [0.0] * ranks
    for rank in reversed(range(ranks)):
        port = 0.0
        for child in children(rank, ranks):
            share = nbytes * len(subtree(child, ranks)) / ranks if cut else nbytes
            port = max(ready[child] + alpha + beta * share, port + overhead + beta * share)
        ready[rank] = port
    return ready[0]


# --- the algorithms ---


@algorithm("broadcast", "binomial", sends=broadcast_sends, seconds=down_seconds)
def broadcast(comm: PointToPoint, array: np.ndarray, root: int) -> np.ndarray:
    """Receive from the parent and send to the children, farthest first: ceil(log2 n) messages leave the root."""
    # In the picture's numbers the root is 0, so `me` is this rank's distance from it.
    n = comm.size
    me = (comm.rank - root) % n
    if me:
        comm.recv(array, (root + me - lowest_bit(me, n)) % n)

    # Farthest first, round 1 of the picture: for n = 2^k that child has the deepest subtree and must begin earliest.
    for child in reversed(children(me, n)):
        comm.send(array, (root + child) % n)
    return array


@algorithm("reduce", "binomial", sends=lambda sizes, rank: (1, sum(sizes)) if rank else (0, 0), seconds=up_seconds)
def reduce(comm: PointToPoint, array: np.ndarray, root: int, op: str) -> np.ndarray | None:
    """Add what the children send, nearest first, and send the sum to the parent: one message from all but the root."""
    # The arrows of the picture turned round: the children's sums come in, nearest first.
    n = comm.size
    me, total = (comm.rank - root) % n, array
    for child in children(me, n):
        incoming = xp.empty_like(array)
        comm.recv(incoming, (root + child) % n)
        # The caller's array is not overwritten: the first addition moves to a copy.
        if total is array:
            total = array.copy()
        accumulate(op, total, incoming)

    # A rank below the root passes its subtree's sum to its parent and is done.
    if me:
        comm.send(total, (root + me - lowest_bit(me, n)) % n)
        return None

    # One rank alone has added nothing, but the result is a new array all the same.
    total = total.copy() if total is array else total
    if op == "avg":
        divide(total, n)
    return total


def all_reduce_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what an all-reduce sends: the whole array to each child, and from all but rank 0 to the parent."""
    messages = len(children(rank, len(sizes))) + (rank > 0)
    return messages, messages * sum(sizes)


@algorithm(
    "all_reduce",
    "binomial",
    sends=all_reduce_sends,
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: (
        up_seconds(nbytes, n, alpha, beta, overhead) + down_seconds(nbytes, n, alpha, beta, overhead)
    ),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Reduce to rank 0, then broadcast."""
    total = reduce(comm, array, 0, op)
    if total is not None:
        array[...] = total
    return broadcast(comm, array, 0)


@algorithm(
    "gather",
    "binomial",
    sends=lambda sizes, rank: (1, sum(sizes[v] for v in subtree(rank, len(sizes)))) if rank else (0, 0),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: up_seconds(nbytes, n, alpha, beta, overhead, cut=True),
)
def gather(comm: PointToPoint, shard: np.ndarray, sizes: list[int], root: int) -> np.ndarray | None:
    """Send the whole subtree's shards to the parent in one message."""
    # The subtree is the range me, me + 1, ..., so each child's part lies in one piece of `held`.
    n = comm.size
    me = (comm.rank - root) % n
    below = subtree(me, n)
    start = offsets([sizes[(root + v) % n] for v in below])  # in the order of the tree
    held = xp.empty_like(shard, shape=(start[-1],))
    held[: start[1]] = shard.reshape(-1)

    # Each child sends its whole subtree in one message.
    for child in children(me, n):
        range_ = subtree(child, n)
        comm.recv(held[start[range_.start - me] : start[range_.stop - me]], (root + child) % n)
    if me:
        comm.send(held, (root + me - lowest_bit(me, n)) % n)
        return None

    # The root's order is root, root + 1, ...; the caller expects rank order.
    return _rotated(held, start[n - root])


@algorithm(
    "scatter",
    "binomial",
    sends=scatter_sends,
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: down_seconds(nbytes, n, alpha, beta, overhead, cut=True),
)
def scatter(comm: PointToPoint, array: np.ndarray | None, sizes: list[int], out: np.ndarray, root: int) -> np.ndarray:
    """Receive the subtree's chunks in one message and pass on the children's.

    Only the root knows the sizes: a rank with children gets, before the chunks, their sizes (8 B each).
    """
    n = comm.size
    me = (comm.rank - root) % n
    below, parent = subtree(me, n), (root + me - lowest_bit(me, n)) % n

    # A leaf knows its size; any other rank receives the sizes of its subtree first.
    if len(below) == 1 and me:
        comm.recv(out.reshape(-1), parent)
        return out
    counts = np.empty(len(below), dtype=np.int64)
    if me:
        comm.recv(counts, parent)
        held = xp.empty_like(out, shape=(int(counts.sum()),))
        comm.recv(held, parent)
    else:
        # The root brings the chunks into the tree's order: its own first.
        assert array is not None
        counts[...] = np.roll(sizes, -root)
        held = _rotated(array.reshape(-1), offsets(sizes)[root])

    # Pass each child's part on, the farthest child first: for n = 2^k it has the most ranks below it.
    start = offsets(counts.tolist())
    sends = []
    for child in reversed(children(me, n)):
        range_, to = subtree(child, n), (root + child) % n
        if len(range_) > 1:
            sends.append(comm.isend(counts[range_.start - me : range_.stop - me], to))
        sends.append(comm.isend(held[start[range_.start - me] : start[range_.stop - me]], to))
    out.reshape(-1)[...] = held[: start[1]]
    comm.waitall(sends)
    return out


def _rotated(array: np.ndarray, start: int) -> np.ndarray:
    """Return the elements from `start` on, then those before: between the order of the tree and that of the ranks."""
    if start in (0, array.size):
        return array
    result = xp.empty_like(array)
    result[: array.size - start], result[array.size - start :] = array[start:], array[:start]
    return result
