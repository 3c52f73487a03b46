"""Expert parallelism of ranks with different numbers of tokens, which have different capacities C_r.

    rank 0: 5 tokens, C_0 = 3     expert of rank 1 computes | 3 slots of rank 0 | 2 slots of rank 1 |
    rank 1: 4 tokens, C_1 = 2

Every forward pass of a layer begins with an all-gather of the capacities, 8 B per rank, and an expert computes
(experts / P, C_0 + C_1 + ..., D). Otherwise as in core/parallel/expert_parallel.py.

Proved by: tests/train/test_shares.py
"""

from itertools import pairwise

import numpy as np

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.layout import cut, offsets
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather, all_to_all
from minidist.core.comm import Comm
from minidist.core.nn.module import Module
from minidist.core.parallel.expert_parallel import Exchange, ExpertParallel
from minidist.core.parallel.tensor_parallel import border, contiguous


class RaggedExpertParallel(ExpertParallel):
    """`ExpertParallel` of ranks that agree on their capacities in every forward pass."""

    def exchanges(self, comm: Comm) -> tuple[Module, Module]:
        """As in `ExpertParallel`; the way back has the capacities of the way to the experts."""
        capacities = Capacities(comm)
        return RaggedExchange(comm, True, capacities), RaggedExchange(comm, False, capacities)


class Capacities:
    """The slots per expert of every rank in the running forward pass, where they differ. latest: in rank order."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.latest: list[int] = []

    def agree(self, capacity: int) -> None:
        """Gather the capacities of all ranks: each sends 8 B to every other one (purpose `dispatch`)."""
        with purpose("dispatch"):
            self.latest = all_gather(self.comm, np.array([capacity], np.int64)).tolist()


class RaggedExchange(Exchange):
    """An `Exchange` whose ranks have different capacities: the way to the experts agrees on them."""

    def __init__(self, comm: Comm, to_experts: bool, capacities: Capacities) -> None:
        super().__init__(comm, to_experts)
        self.capacities = capacities

    def forward(self, slots: Tensor) -> Tensor:
        """(experts, C_r, D) -> (experts / P, sum of C, D), or with to_experts=False back."""
        if self.to_experts:
            self.capacities.agree(slots.shape[1])
        capacities = self.capacities.latest

        def way(comm: Comm, slots: xp.Array, why: str) -> xp.Array:
            return exchange_ragged(capacities, comm, slots, self.to_experts == (why == "tensor_forward"))

        return border("exchange_slots", slots, self.comm, way, way)


def exchange_ragged(capacities: list[int], comm: Comm, slots: xp.Array, to_experts: bool) -> xp.Array:
    """Exchange slots (experts, C_r, D) -> (experts / P, sum of C, D), or back, where each rank r has its own C_r."""
    width, mine = slots.shape[-1], capacities[comm.rank]
    local = slots.shape[0] // comm.size if to_experts else slots.shape[0]
    own, others = [local * mine * width] * comm.size, [local * capacity * width for capacity in capacities]
    comm.advance_clock("dispatch")

    # To the experts: what goes to one rank lies together, and what comes is joined slot by slot of each expert.
    if to_experts:
        with purpose("dispatch"):
            flat = all_to_all(comm, contiguous(slots).reshape(-1), send_counts=own, receive_counts=others)
        parts = [part.reshape(local, -1, width) for part in cut(flat, others)]
        return xp.concatenate(parts, axis=1)

    # Back: each rank's slots are cut out of those of all, and what comes lies in the order of the experts.
    starts = offsets(capacities)
    pieces = [slots[:, start:stop].reshape(-1) for start, stop in pairwise(starts)]
    with purpose("dispatch"):
        flat = all_to_all(comm, xp.concatenate(pieces), send_counts=others, receive_counts=own)
    back: xp.Array = flat.reshape(comm.size * local, mine, width)
    return back
