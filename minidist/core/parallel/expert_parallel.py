"""Expert parallelism: each rank has some of the experts and its own tokens; an all-to-all brings them together.

    rank 0: tokens ─ slots | e0 | e1 | e2 | e3 |        rank 0 computes e0, e1 for the tokens of all ranks
    rank 1: tokens ─ slots | e0 | e1 | e2 | e3 |        rank 1 computes e2, e3
                             └──▶ rank 0 └──▶ rank 1    then back in the same way

All slots of an expert are put together, so (experts, capacity, D) becomes (experts / P, P x capacity, D). There
are two all-to-alls in forward and two in backward, each of (P-1)/P experts x capacity x D numbers per rank, whether the
slots are full or not (purpose `dispatch`): with capacity = k tokens / experts x factor that is (P-1)/P k factor tokens
D. The rank of an expert has seen the tokens of all ep ranks, so its gradient is summed over dp and cp only.

Sources: Lepikhin et al., "GShard", 2020; Fedus et al., "Switch Transformers", 2021.

Proved by: tests/parallel/test_expert.py
"""

from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_to_all
from minidist.core.comm import Comm
from minidist.core.nn import Module
from minidist.core.parallel.tensor_parallel import ShardContext, border, contiguous


class ExpertParallel:
    """A MixtureOfExperts for `parallelize_module(model, mesh["ep"], plan, axis="ep")`: each rank keeps its experts.

    The ranks must have equal numbers of tokens; `RaggedExpertParallel` is for others.
    """

    def __call__(self, module: Any, context: ShardContext, name: str) -> Module:
        """Return the mixture with its experts' weights sharded and all-to-alls as its `dispatch` and `combine`."""
        comm, experts = context.comm, module.num_experts
        hooks.check_divisible(experts, f"experts of {name}", comm.size, "expert")

        # Experts are the first dim. Every rank routes its own tokens, so the router is a replica.
        for part in module.expert_dims:
            setattr(module, part, context.shard_of(getattr(module, part), 0))
        context.replica_of(module.router)
        if comm.size > 1:
            module.dispatch, module.combine = self.exchanges(comm)
        return module

    def exchanges(self, comm: Comm) -> tuple[Module, Module]:
        """Return the modules that bring the slots to the experts' ranks, and back."""
        return Exchange(comm, to_experts=True), Exchange(comm, to_experts=False)


class Exchange(Module):
    """An all-to-all of slots as a node of the tape: to the experts' ranks, or back to the tokens'."""

    def __init__(self, comm: Comm, to_experts: bool) -> None:
        self.comm, self.to_experts = comm, to_experts

    def forward(self, slots: Tensor) -> Tensor:
        """(experts, C, D) -> (experts / P, P C, D), or with to_experts=False back; backward does the opposite."""
        return border("exchange_slots", slots, self.comm, self.exchange, self.exchange)

    def exchange(self, comm: Comm, slots: xp.Array, why: str) -> xp.Array:
        """Exchange slots, or their gradients, by one all-to-all."""
        ranks, width = comm.size, slots.shape[-1]
        to_experts = self.to_experts == (why == "tensor_forward")  # backward goes the other way
        if to_experts:
            # (ranks x local experts, C, D): the experts of rank j are neighbours, so what it receives lies together.
            outgoing = contiguous(slots)
            local, capacity = slots.shape[0] // ranks, slots.shape[1]
        else:
            # (local experts, ranks x C, D) -> (ranks, local experts, C, D): what returns to rank j lies together.
            local, capacity = slots.shape[0], slots.shape[1] // ranks
            outgoing = contiguous(slots.reshape(local, ranks, capacity, width).swapaxes(0, 1))

        comm.advance_clock("dispatch")
        with purpose("dispatch"):
            received = all_to_all(comm, outgoing.reshape(-1)).reshape(ranks, local, capacity, width)

        # (ranks, local experts, C, D): on the way back the ranks are joined with the experts, before with the slots.
        if not to_experts:
            return received.reshape(ranks * local, capacity, width)
        return contiguous(received.swapaxes(0, 1)).reshape(local, ranks * capacity, width)
