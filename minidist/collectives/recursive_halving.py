"""Recursive halving: exchange half of the array with a far partner, a quarter with a nearer one: log2 n short rounds.

Reduce-scatter, 4 ranks, chunks 0..3; each rank keeps the half that holds its own chunk and gives the other half away:

    round 1    0 ──23──▶ 2    1 ──23──▶ 3    2 ──01──▶ 0    3 ──01──▶ 1      half of the array
    round 2    0 ──1──▶ 1     2 ──3──▶ 3     1 ──0──▶ 0     3 ──2──▶ 2       a quarter

*Rabenseifner's* all-reduce is this and then the all-gather of recursive doubling: 2 log2 n messages and the ring's
2 (n-1)/n of the array, the best of both for long messages. When n is no power of two, see `folding`: two messages more,
each the whole array.

Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
"""

import numpy as np

from minidist.base.layout import chunk_sizes, offsets
from minidist.collectives.folding import Fold
from minidist.collectives.operations import accumulate, combine, divide_if_average
from minidist.collectives.recursive_doubling import gather_doubling
from minidist.collectives.registry import algorithm
from minidist.comm.communicator import Comm


@algorithm("reduce_scatter", "recursive_halving")
def reduce_scatter(comm: Comm, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """log2 n messages a rank, each half as long as the one before: everything but the rank's own chunk in all."""
    fold, rank, start = Fold(comm.size), comm.rank, offsets(sizes)
    flat = array.reshape(-1)
    if fold.gives(rank):
        comm.send(flat, rank + 1)
        comm.recv(out, rank + 1)
        return out
    total = flat.copy()  # the sums grow here: `array` stays as it was
    if fold.takes(rank):
        incoming = np.empty_like(flat)
        comm.recv(incoming, rank - 1)
        combine(op, incoming, total, out=total)
    scatter_halving(comm, fold, total, offsets(fold.merge(sizes)), op)
    if fold.takes(rank):
        theirs = total[start[rank - 1] : start[rank]]
        divide_if_average(op, theirs, comm.size)
        comm.send(theirs, rank - 1)
    out[...] = total[start[rank] : start[rank + 1]]
    divide_if_average(op, out, comm.size)
    return out


@algorithm("all_reduce", "rabenseifner")
def all_reduce(comm: Comm, array: np.ndarray, op: str) -> np.ndarray:
    """Recursive halving, then doubling, in place: 2 log2 n messages a rank."""
    fold, rank = Fold(comm.size), comm.rank
    flat = array.reshape(-1)
    if fold.gives(rank):
        comm.send(flat, rank + 1)
        comm.recv(flat, rank + 1)
        return array
    if fold.takes(rank):
        incoming = np.empty_like(flat)
        comm.recv(incoming, rank - 1)
        combine(op, incoming, flat, out=flat)
    start, me = offsets(chunk_sizes(flat.size, fold.power)), fold.number(rank)
    scatter_halving(comm, fold, flat, start, op)
    divide_if_average(op, flat[start[me] : start[me + 1]], comm.size)
    gather_doubling(comm, fold, flat, start)
    if fold.takes(rank):
        comm.send(flat, rank - 1)
    return array


def scatter_halving(comm: Comm, fold: Fold, total: np.ndarray, start: list[int], op: str) -> None:
    """Folded number v ends with the sum over all in elements [start[v], start[v+1]) of `total`; the rest is overwritten
    with partial sums."""
    me, distance = fold.number(comm.rank), fold.power // 2
    while distance:
        first = me // distance * distance  # the block of `distance` numbers that this rank stays in
        other = first ^ distance
        keep, give = (total[start[b] : start[b + distance]] for b in (first, other))
        incoming, partner = np.empty_like(keep), fold.rank(me ^ distance)
        comm.sendrecv(give, partner, incoming, partner)
        accumulate(op, keep, incoming)
        distance //= 2
