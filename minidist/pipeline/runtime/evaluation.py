"""The forward passes of a pipeline alone: an evaluation on the stages of one that trains.

Proved by: tests/pipeline/test_runtime.py, tests/train/test_pipelines.py
"""

from collections.abc import Sequence

from minidist.core.pipeline.runtime.pipeline import Loss
from minidist.core.pipeline.runtime.reduction import Reduction
from minidist.pipeline.passes import forwards
from minidist.pipeline.runtime.pipeline import Pipeline


class Evaluation(Pipeline):
    """The stages of `pipe` on the same ranks, forward only: `step` returns losses and leaves gradients alone.

    count: of the plan's first micro-batches only. Every rank makes it, after a step of `pipe`: it knows the shapes that
    `pipe` has learned, and sends nothing for them.
    """

    def __init__(self, pipe: Pipeline, loss: Loss, count: int | None = None) -> None:
        self.known = pipe.shapes[:count], pipe.boundaries
        if count is not None:
            self.known = pipe.shapes[:count], {key: value for key, value in pipe.boundaries.items() if key[1] < count}
        plan, stages = forwards(pipe.plan, count), list(pipe.stages.values())
        super().__init__(pipe.comm, plan, stages, loss, reduce=pipe.reduce, coordinates=pipe.coordinates)

    def agree(self, reduce: Reduction, tied: Sequence[str]) -> None:
        self.know(*self.known)
