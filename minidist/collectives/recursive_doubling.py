"""Recursive doubling: in each round what a rank knows doubles, so log2 n rounds are enough. For short messages.

    round 1    0 ◀─▶ 1    2 ◀─▶ 3    4 ◀─▶ 5    6 ◀─▶ 7        partner: rank xor 1
    round 2    0 ◀─▶ 2    1 ◀─▶ 3    4 ◀─▶ 6    5 ◀─▶ 7        rank xor 2
    round 3    0 ◀─▶ 4    1 ◀─▶ 5    2 ◀─▶ 6    3 ◀─▶ 7        rank xor 4

All-reduce exchanges the whole array in each round: the fewest rounds there can be, but log2 n times the bytes, where
the ring sends less than twice. All-gather exchanges what is known so far and is as good as the ring in bytes too. When
n is not a power of two, see `folding`: two more rounds.

Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19 (2005).
Proved by: tests/collectives/test_papers.py, tests/collectives/test_collectives.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.collectives.folding import Fold, doubling_rounds, folded_seconds, place_of
from minidist.core.base import arrays as xp
from minidist.core.base.layout import offsets
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.comm.communicator import PointToPoint

SHORT = 64 * 1024  # bytes of an array that a call may keep


def all_reduce_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what is sent: the whole array in each of floor(log2 n) rounds; a folded pair: the whole there and back."""
    fold = Fold(len(sizes))
    messages = 1 if fold.gives(rank) else fold.power.bit_length() - 1 + fold.takes(rank)
    return messages, messages * sum(sizes)


def all_reduce_seconds(nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds of log2 n whole arrays for n = 2^k; otherwise of at most floor(log2 n) + 2 of them."""
    fold = Fold(ranks)
    rounds = [(1 << i, [nbytes] * fold.power) for i in range(fold.power.bit_length() - 1)]
    return folded_seconds(fold, [nbytes] * fold.extra, rounds, [nbytes] * fold.extra, alpha, beta, overhead)


@algorithm("all_reduce", "recursive_doubling", sends=all_reduce_sends, seconds=all_reduce_seconds)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Exchange the whole array log2 n times. Lower ranks' values come first, so all ranks have the same bits."""
    rank, n = comm.rank, comm.size
    gives, takes, partners = place_of(n, rank)

    # Fold: a rank that gives waits for the result, its neighbour works for both.
    if gives:
        comm.send(array, rank + 1)
        comm.recv(array, rank + 1)
        return array
    # A call that is made again has an array already: to make one takes a tenth of the time of a short message.
    call: Any = comm
    incoming = getattr(call, "incoming", None)
    if incoming is None or incoming.shape != array.shape or incoming.dtype is not array.dtype:
        incoming = xp.empty_like(array)
        call.incoming = incoming if incoming.nbytes <= SHORT else None
    if takes:
        comm.recv(incoming, rank - 1)
        accumulate(op, incoming, array, array)

    # Rounds 1, 2, 3, ... of the picture.
    for partner in partners:
        comm.sendrecv(array, partner, incoming, partner)
        first, second = (incoming, array) if partner < rank else (array, incoming)
        accumulate(op, first, second, array)

    # Unfold: the neighbour that gave gets the result.
    if op == "avg":
        divide(array, n)
    if takes:
        comm.send(array, rank - 1)
    return array


def all_gather_sends(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return what is sent: in each round all that is known so far; a folded pair: its shard there, the whole back."""
    fold = Fold(len(sizes))
    if fold.gives(rank):
        return 1, sizes[rank]
    merged, me, rounds = fold.merge(sizes), fold.number(rank), fold.power.bit_length() - 1
    known = [sum(merged[me >> i << i : (me >> i << i) + (1 << i)]) for i in range(rounds)]
    return rounds + fold.takes(rank), sum(known) + fold.takes(rank) * sum(sizes)


def all_gather_seconds(sizes: Sequence[float], alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds; with equal shards log2 n alpha + (n-1)/n beta nbytes for n = 2^k.

    sizes: bytes of each rank's shard.
    """
    fold = Fold(len(sizes))
    first, last = sizes[: 2 * fold.extra : 2], [sum(sizes)] * fold.extra  # the folded pairs' messages
    return folded_seconds(fold, first, doubling_rounds(fold.merge(sizes)), last, alpha, beta, overhead)


@algorithm(
    "all_gather",
    "recursive_doubling",
    sends=all_gather_sends,
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: all_gather_seconds([nbytes / n] * n, alpha, beta, overhead),
)
def all_gather(comm: PointToPoint, shard: np.ndarray, sizes: list[int], out: np.ndarray) -> np.ndarray:
    """Exchange log2 n messages, each twice as long as the one before: everything but the own shard in all."""
    fold, rank, start = Fold(comm.size), comm.rank, offsets(sizes)
    # This rank's shard goes to its place in `out`, from where it is sent.
    mine = out[start[rank] : start[rank + 1]]
    mine[...] = shard.reshape(-1)  # if it lies there already, NumPy copies nothing

    # Fold: a rank that gives waits for the whole; its neighbour brings in both shards.
    if fold.gives(rank):
        comm.send(mine, rank + 1)
        comm.recv(out, rank + 1)
        return out
    if fold.takes(rank):
        comm.recv(out[start[rank - 1] : start[rank]], rank - 1)

    # The rounds of the picture, in blocks of the folded numbers; then the whole goes back to the neighbour.
    gather_doubling(comm, fold, out, offsets(fold.merge(sizes)))
    if fold.takes(rank):
        comm.send(out, rank - 1)
    return out


def gather_doubling(comm: PointToPoint, fold: Fold, out: np.ndarray, start: list[int]) -> None:
    """Folded number v holds elements [start[v], start[v+1]) of `out`; afterwards each holds them all."""
    # Known before a round: an aligned block of `distance` numbers; its partner knows the block next to it.
    me, distance = fold.number(comm.rank), 1
    while distance < fold.power:
        first = me // distance * distance  # this rank's block of `distance` numbers, which are known
        other = first ^ distance
        known, unknown = (out[start[b] : start[b + distance]] for b in (first, other))
        partner = fold.rank(me ^ distance)
        comm.sendrecv(known, partner, unknown, partner)
        distance *= 2
