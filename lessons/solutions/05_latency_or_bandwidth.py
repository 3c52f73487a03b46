"""Our solutions of lesson 05; they are not a part of the package."""

from math import log2

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.comm import Comm


def halving_doubling(comm: Comm, array: np.ndarray) -> None:
    """Sum in place: ranks beyond a power of two send their part to another rank; the others halve, then double."""
    n, rank = comm.size, comm.rank
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    if rank >= power:  # one of the extra ranks: its part goes to rank - power, the sum comes back
        comm.send(array, rank - power)
        comm.recv(array, rank - power)
        return

    incoming = np.empty_like(array)
    if rank < extra:
        comm.recv(incoming, rank + power)
        array += incoming

    start = offsets(chunk_sizes(array.size, power))
    distance = power // 2
    while distance:  # keep the half that holds this rank's chunk, send the other half
        first = rank // distance * distance
        keep, give = (array[start[b] : start[b + distance]] for b in (first, first ^ distance))
        part = incoming[: keep.size]
        comm.sendrecv(give, rank ^ distance, part, rank ^ distance)
        keep += part
        distance //= 2

    distance = 1
    while distance < power:  # what is complete doubles
        first = rank // distance * distance
        known, unknown = (array[start[b] : start[b + distance]] for b in (first, first ^ distance))
        comm.sendrecv(known, rank ^ distance, unknown, rank ^ distance)
        distance *= 2

    if rank < extra:
        comm.send(array, rank + power)


def choose(n: int, size: float, alpha: float, beta: float) -> str:
    """Return the cheapest of NAMES for n ranks, a power of two, and an array of `size` bytes."""
    rounds, share = log2(n), (n - 1) / n
    costs = {
        "binomial": 2 * rounds * (alpha + beta * size),
        "recursive_doubling": rounds * (alpha + beta * size),
        "rabenseifner": 2 * rounds * alpha + 2 * share * beta * size,
        "ring": 2 * (n - 1) * alpha + 2 * share * beta * size,
    }
    return min(costs, key=costs.__getitem__)


SOLUTIONS = {"05.halving_doubling": halving_doubling, "05.choose": choose}
