"""What a ring does on all of its ranks, computed for all ranks at once: their ends, messages, bytes and memory.

Each phase of a ring of n ranks has n (n-1) messages, so running one on 2,048 simulated ranks takes minutes. Each step
is the same for every rank, so here a step is a few operations on arrays with one element per rank, by the formulas of
`core/comm/sim/matching.py` and in the order of `core/collectives/ring.py`: post the receive, post the send, wait for
both.

Proved by: tests/collectives/test_one_event.py
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minidist.comm.sim.folded import Outcome, Ports
from minidist.comm.sim.links import LinkModel

# Of each operation, the chunk that rank r sends first, counted backward from r, per round of n-1 steps.
FIRST_CHUNKS = {"reduce_scatter": (1,), "all_gather": (0,), "all_reduce": (1, 0)}


class Links(NamedTuple):
    """The costs of the link from each rank to the next: seconds, seconds per byte, and seconds that a port is busy."""

    alpha: np.ndarray
    beta: np.ndarray
    overhead: float


def ring_outcome(operation: str, sizes: Sequence[int], itemsize: int, links: Links, begins: Sequence[Ports]) -> Outcome:
    """Return the ends, messages and bytes of each rank.

    operation: a key of `FIRST_CHUNKS`. sizes: elements of each rank's chunk. begins: from when each rank is free.
    """
    n, chunks = len(sizes), itemsize * np.array(sizes, np.int64)
    time, out_free, in_free = np.array(begins).T.copy()
    sent = np.zeros(n, np.int64)
    ranks = np.arange(n)
    before, after = ranks - 1, (ranks + 1) % n  # index -1 is the last rank
    beta_in = links.beta[before]
    for first in FIRST_CHUNKS[operation]:
        for step in range(first, first + n - 1):
            # Rank r sends chunk r - step to r + 1; both requests are posted now.
            nbytes, posted = chunks[ranks - step], time
            out_free = np.maximum(time, out_free) + links.beta * nbytes
            arrival = (out_free + links.alpha)[before]
            out_free = out_free + links.overhead
            sent += nbytes

            # The receive ends first. The send ends no earlier than its receive is posted.
            busy = links.overhead + beta_in * nbytes[before]
            in_free = np.maximum(np.maximum(arrival, in_free + busy), posted)
            time = np.maximum(time, in_free)
            time = np.maximum(np.maximum(time, out_free), posted[after])

    messages = [(n - 1) * len(FIRST_CHUNKS[operation])] * n
    ends = [Ports(*ports) for ports in np.stack([time, out_free, in_free], axis=1).tolist()]
    return Outcome(ends, messages, sent.tolist())


def ring_memory(operation: str, sizes: Sequence[int], itemsize: int) -> list[int]:
    """Return the most bytes that the ring allocates on each rank for messages (purpose communication)."""
    n = len(sizes)
    if operation == "all_gather":
        return [0] * n
    if operation == "all_reduce":
        return [itemsize * sizes[0]] * n

    # A reduce-scatter has the chunk that arrives and the one that leaves. The first one that leaves is part of the
    # array, and the last one that arrives is the result.
    chunks = itemsize * np.array(sizes, np.int64)
    most = np.zeros(n, np.int64)
    for step in range(1, n):
        leaving = np.roll(chunks, step) if step > 1 else 0
        arriving = np.roll(chunks, step + 1) if step < n - 1 else 0
        most = np.maximum(most, leaving + arriving)
    return most.tolist()


def links_of(links: LinkModel, members: Sequence[int], is_free: bool) -> Links:
    """Return the costs of the ring's links; is_free: its messages take no time (`LinkModel.free_startup`)."""
    n = len(members)
    if is_free:
        return Links(np.zeros(n), np.zeros(n), 0.0)
    costs = [links.cost(a, b) for a, b in zip(members, [*members[1:], members[0]], strict=True)]
    alpha, beta = np.array(costs).T
    return Links(alpha, beta, links.overhead)
