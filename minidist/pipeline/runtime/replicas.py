"""Pipelines that are replicas of each other, without a strategy: gradients are all-reduced over the data axis.

    pipe = Pipeline(mesh["pp"], plan, stages, loss, reduce=Reduction(mesh["dp"], "ordered"))

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py
"""

from collections.abc import Mapping, Sequence

from minidist.core.comm import Comm
from minidist.core.parallel.gradients import GradientReducer
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime import PipelineStage, reduction


class Reduction(reduction.Reduction):
    """Sums the gradients of one pipeline's stages over their places, and over the replicas that `data` connects.

    data: communicator of the data axis; None: there is one pipeline. algorithm: of the all-reduce.
    """

    def __init__(self, data: Comm | None = None, algorithm: str = "ring") -> None:
        super().__init__(data)
        self.algorithm = algorithm

    def bind(self, comm: Comm, plan: Plan, stages: Mapping[int, PipelineStage], tied: Sequence[str]) -> None:
        made: dict[int, list[GradientReducer]] = {}
        if self.data is not None and self.data.size > 1:
            for n, stage in sorted(stages.items()):
                for flat in filter(len, stage.flats):
                    reducer = GradientReducer(flat, self.data.dup(), algorithm=self.algorithm, unused="zeros")
                    made.setdefault(n, []).append(reducer)
        self.reducers = made
        super().bind(comm, plan, stages, tied)
