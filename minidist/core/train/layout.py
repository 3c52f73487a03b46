"""How the ranks of a job share its model and its batch: a degree for each axis, and what is chosen on each of them.

    symbol                 source
    pp, schedule, v        a pipeline of pp ranks with v stages each          GPipe; PipeDream; Megatron-LM
    dp, zero, reduction    replicas, and what they shard                      PyTorch DDP; ZeRO; FSDP
    cp, attention, u       parts of each sequence                             Ring Attention; DeepSpeed-Ulysses; USP
    tp, sequence_parallel  shards of each matrix                              Megatron-LM; Korthikanti et al.
    ep                     shares of the experts                              GShard

Proved by: tests/train/test_core_runs.py, tests/parallel/test_dims.py
"""

from dataclasses import dataclass

from minidist.core.base.errors import UsageError, quoted
from minidist.core.comm import Comm
from minidist.core.parallel.dims import Axes, ParallelDims


@dataclass(frozen=True)
class ParallelLayout(ParallelDims):
    """The degrees of `ParallelDims`, and how each axis works.

    zero: 0, whole replicas; 1 shards the optimizer, 2 the gradients too, 3 the parameters too. reduction: the algorithm
    that sums gradients. schedule: the order of a pipeline that drains in every step. chunks (v): stages of a pipeline
    rank; None: what the schedule takes. attention: how the parts of a sequence meet. ulysses (u): neighbours that
    exchange heads, with "ulysses-ring". sequence_parallel: norms and dropout on 1/tp of the sequence.
    """

    zero: int = 0
    reduction: str = "ring"
    schedule: str = "1f1b"
    chunks: int | None = None
    attention: str = "ring"
    ulysses: int = 2
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.zero not in range(4):
            raise UsageError(f"ParallelLayout(zero={quoted(self.zero)}); the stage of ZeRO is 0, 1, 2 or 3")

    def axes(self, comm: Comm) -> Axes:
        """Return this rank's communicators; UsageError when the degrees do not fit the ranks of `comm`."""
        if self.ranks != comm.size:
            degrees = f"pp={self.pp}, dp={self.dp}, cp={self.cp}, tp={self.tp}"
            raise UsageError(
                f"ParallelLayout({degrees}) is for {self.ranks} ranks, and there are {comm.size}; make the product of"
                " the degrees equal to the number of ranks"
            )
        if self.dp % self.ep:
            raise UsageError(
                f"ParallelLayout(dp={self.dp}, ep={self.ep}): ep divides dp; choose a divisor of {self.dp}"
            )
        return super().axes(comm)
