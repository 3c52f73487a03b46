"""Recursive halving: exchange half of the array with a far partner, a quarter with a nearer one: log2 n short rounds.

Reduce-scatter, 4 ranks, chunks 0..3; each rank keeps the half that holds its own chunk and gives the other half away:

    round 1    0 ──23──▶ 2    1 ──23──▶ 3    2 ──01──▶ 0    3 ──01──▶ 1      half of the array
    round 2    0 ──1──▶ 1     2 ──3──▶ 3     1 ──0──▶ 0     3 ──2──▶ 2       a quarter

*Rabenseifner's* all-reduce is this and then the all-gather of recursive doubling: 2 log2 n messages and the ring's
2 (n-1)/n of the array, the best of both for long messages. When n is not a power of two, see `folding`: two messages
more, each the whole array.

Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
Proved by: tests/collectives/test_papers.py, tests/collectives/test_collectives.py
"""

from collections.abc import Sequence

import numpy as np

from minidist.collectives.folding import Fold, doubling_rounds, folded_seconds, halving_rounds
from minidist.collectives.recursive_doubling import all_gather_sends, gather_doubling
from minidist.core.base import arrays as xp
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.comm.communicator import PointToPoint


def reduce_scatter_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what is sent: all but the (folded) own chunk; a folded pair: the whole there, one chunk back."""
    fold = Fold(len(sizes))
    if fold.gives(rank):
        return 1, sum(sizes)
    given = sum(sizes) - fold.merge(sizes)[fold.number(rank)]
    return fold.power.bit_length() - 1 + fold.takes(rank), given + (sizes[rank - 1] if fold.takes(rank) else 0)


def reduce_scatter_seconds(sizes: Sequence[float], alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds; with equal chunks log2 n alpha + (n-1)/n beta nbytes for n = 2^k.

    sizes: bytes of each rank's chunk.
    """
    fold = Fold(len(sizes))
    first, last = [sum(sizes)] * fold.extra, sizes[: 2 * fold.extra : 2]  # the folded pairs' messages
    return folded_seconds(fold, first, halving_rounds(fold.merge(sizes)), last, alpha, beta, overhead)


@algorithm(
    "reduce_scatter",
    "recursive_halving",
    sends=reduce_scatter_sends,
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: reduce_scatter_seconds(
        [nbytes / n] * n, alpha, beta, overhead
    ),
)
def reduce_scatter(comm: PointToPoint, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """Exchange log2 n messages, each half as long as the one before: everything but the own chunk in all."""
    fold, rank, start = Fold(comm.size), comm.rank, offsets(sizes)
    flat = array.reshape(-1)

    # Fold: a rank that gives waits for its chunk, its neighbour works for both.
    if fold.gives(rank):
        comm.send(flat, rank + 1)
        comm.recv(out, rank + 1)
        return out
    total = flat.copy()  # the sums grow here: `array` stays as it was
    if fold.takes(rank):
        incoming = xp.empty_like(flat)
        comm.recv(incoming, rank - 1)
        accumulate(op, incoming, total, total)

    # The rounds of the picture; then each folded number has the sum of its one or two chunks.
    scatter_halving(comm, fold, total, offsets(fold.merge(sizes)), op)
    if fold.takes(rank):
        # Unfold: the neighbour that gave gets its chunk.
        theirs = total[start[rank - 1] : start[rank]]
        if op == "avg":
            divide(theirs, comm.size)
        comm.send(theirs, rank - 1)
    out[...] = total[start[rank] : start[rank + 1]]
    if op == "avg":
        divide(out, comm.size)
    return out


def all_reduce_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what is sent: halving's chunks, doubling's chunks and, of a folded pair, the whole there and back."""
    fold, size = Fold(len(sizes)), sum(sizes)
    # Fold: a rank that gives waits for the result, its neighbour works for both.
    if fold.gives(rank):
        return 1, size
    chunks, me = chunk_sizes(size, fold.power), fold.number(rank)
    scattered, gathered = reduce_scatter_sends(chunks, me), all_gather_sends(chunks, me)
    return scattered[0] + gathered[0] + fold.takes(rank), scattered[1] + gathered[1] + fold.takes(rank) * size


def all_reduce_seconds(shares: Sequence[float], ranks: int, alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds; with equal shares 2 log2 n alpha + 2 (n-1)/n beta nbytes for n = 2^k.

    For other n at most 2 (alpha + beta nbytes) more than that of q. shares: bytes of each folded number's chunk.
    """
    whole, rounds = [sum(shares)] * ranks, halving_rounds(shares) + doubling_rounds(shares)
    return folded_seconds(Fold(ranks), whole, rounds, whole, alpha, beta, overhead)


def equal_shares(nbytes: float, ranks: int) -> list[float]:
    """Return `nbytes` cut into equal shares of the folded numbers."""
    power = Fold(ranks).power
    return [nbytes / power] * power


@algorithm(
    "all_reduce",
    "rabenseifner",
    sends=all_reduce_sends,
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: all_reduce_seconds(
        equal_shares(nbytes, n), n, alpha, beta, overhead
    ),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Recursive halving, then doubling, in place: 2 log2 n messages per rank."""
    fold, rank = Fold(comm.size), comm.rank
    flat = array.reshape(-1)
    if fold.gives(rank):
        comm.send(flat, rank + 1)
        comm.recv(flat, rank + 1)
        return array

    # Unfold: the neighbour that gave gets the whole.
    if fold.takes(rank):
        incoming = xp.empty_like(flat)
        comm.recv(incoming, rank - 1)
        accumulate(op, incoming, flat, flat)

    # Reduce-scatter by halving, divide the own chunk, all-gather by doubling.
    start, me = offsets(chunk_sizes(flat.size, fold.power)), fold.number(rank)
    scatter_halving(comm, fold, flat, start, op)
    if op == "avg":
        divide(flat[start[me] : start[me + 1]], comm.size)
    gather_doubling(comm, fold, flat, start)
    if fold.takes(rank):
        comm.send(flat, rank - 1)
    return array


def scatter_halving(comm: PointToPoint, fold: Fold, total: np.ndarray, start: list[int], op: str) -> None:
    """Reduce-scatter `total` in place among the folded numbers.

    Number v ends with the sum over all in elements [start[v], start[v+1]); the rest is overwritten with partial sums.
    """
    # Before a round the sums that this rank still works on are an aligned block of 2 distance chunks; it keeps the half
    # with its own chunk.
    me, distance = fold.number(comm.rank), fold.power // 2
    while distance:
        first = me // distance * distance  # the block of `distance` numbers that this rank stays in
        other = first ^ distance
        keep, give = (total[start[b] : start[b + distance]] for b in (first, other))
        incoming, partner = xp.empty_like(keep), fold.rank(me ^ distance)
        comm.sendrecv(give, partner, incoming, partner)
        accumulate(op, keep, incoming)
        distance //= 2
