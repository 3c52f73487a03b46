"""Who sums the gradients of a rank's stages: first the places of a shared parameter, then the replicas of a stage.

    stage 0  rank 0   wte ──┐                                 rank 0 of the other pipelines: replicas of stage 0
                            ├─ [1] both add (shared.py) ──▶ [2] all-reduce over the data axis ──▶ gradient
    stage 3  rank 3   wte ──┘                                 rank 3 of the other pipelines: replicas of stage 3

A stage without shared parameters needs no [1]: its sum over the replicas starts when its last backward has run
(REDUCE_GRAD in the plan), behind the computations that follow.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py, tests/train/test_pipelines.py
"""

from collections.abc import Callable, Mapping, Sequence

from minidist.core.base import hooks
from minidist.core.comm import Comm
from minidist.core.parallel.flat_shards import Shard
from minidist.core.parallel.gradients import GradientReducer
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.shared import SharedGradients
from minidist.core.pipeline.runtime.stages import PipelineStage


class Reduction:
    """Sums the gradients of one pipeline's stages over their places, and over the replicas that `data` connects.

    data: communicator of the data axis; None: there is one pipeline. algorithm: of the all-reduce.
    reducers: those of each stage, when the caller (ZeRO) has made them. each: they reduce in the backward of every
    micro-batch (ZeRO 2), not once at the end. shards: those of each stage, where gradients are sharded (ZeRO 2 and 3);
    the gradients of shared parameters are then added shard by shard.
    """

    def __init__(
        self,
        data: Comm | None = None,
        algorithm: str = "ring",
        *,
        reducers: Mapping[int, Sequence[GradientReducer]] | None = None,
        each: bool = False,
        shards: Mapping[int, Sequence[Shard]] | None = None,
    ) -> None:
        self.data, self.algorithm, self.given, self.each, self.shards = data, algorithm, reducers, each, shards

    def bind(self, comm: Comm, plan: Plan, stages: Mapping[int, PipelineStage], tied: Sequence[str]) -> None:
        """Make what sums the gradients of these stages. Every rank of the pipeline calls it: it sends (startup)."""
        parameters = {n: stage.parameters for n, stage in stages.items()}
        self.shared = SharedGradients(comm.dup(), parameters, tied, self.shards)
        self.reducers = self.given or {}
        if self.given is None and self.data is not None and self.data.size > 1:
            self.reducers = hooks.replica_reducers(stages, self.data, self.algorithm)
        # Shared parameters are summed over their places first, at the end of the step.
        self.early = set() if self.each else {n for n in self.reducers if n not in self.shared.stages}
        # Statistics of a rank's rows become those of all ranks of its stage (two in DualPipe), then of its replicas.
        self.at_end: list[Callable[[], None]] = []
        ranks_of = plan.holders()
        for n, stage in sorted(stages.items()):
            if len(ranks_of[n]) > 1 or self.data is not None:
                combine = hooks.combine_statistics(stage.module, self.shared.comm, ranks_of[n], self.data)
                self.at_end += [] if combine is None else [combine]

    def finish(self) -> None:
        """End a step: sum shared parameters over their places, then everything over the replicas."""
        if self.shared.groups:
            self.shared.add()
        if not self.each:
            for stage in self.reducers:
                if stage not in self.early:
                    self.start(stage)
            for reducers in self.reducers.values():
                for reducer in reducers:
                    reducer.finish()
        if self.shared.groups:
            self.shared.mark_added()
        for combine in self.at_end:
            combine()

    def start(self, stage: int) -> None:
        """Start the sum over the data axis of a complete stage: all buckets, in order."""
        for reducer in self.reducers[stage]:
            for parameter in reversed(reducer.flat.parameters):
                if parameter.requires_grad and (parameter.grad is not None or reducer.unused == "error"):
                    parameter.zero_fill()  # when nothing was added to it
                    reducer.ready(parameter)
