"""A pipeline whose weights change on the way: each action runs with the version that its micro-batch needs.

    F0  F1  B0 │ F2  B1 │ F3 ...       │ the update of the last backward, before anything that may wait
    v0  v0  v0 │ v1  v0 │ v2           versions that `WeightVersions` binds (pipedream.py)

With a `period`, a `Stream` runs the order beyond the end of the plan (stream.py): what is known of micro-batch i is
what is known of i modulo the period.

Proved by: tests/pipeline/test_pipedream.py, tests/pipeline/test_stream.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.messages import Boundaries
from minidist.core.pipeline.runtime.pipeline import Loss, Shapes, Step
from minidist.core.pipeline.runtime.reduction import Reduction
from minidist.core.pipeline.runtime.stages import PipelineStage
from minidist.parallel.running_statistics import batch_norms
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.pipeline import Observer, Pipeline

V = TypeVar("V")


class MicroBatches(Sequence[Any]):
    """The inputs, or the targets, of a stream: micro-batch i is what read(i) returns, at the time when it is needed.

    first: the micro-batches of the first step, which are not kept; those of later steps have their shapes and dtypes.
    """

    def __init__(self, read: Callable[[int], Any], count: int, first: Sequence[Any]) -> None:
        self.read = read
        # Without data, for what is to be known of every micro-batch before the first one is read.
        empty = [xp.broadcast_to(np.zeros((), value.dtype), value.shape) for value in first]
        self.described = [empty[i % len(empty)] for i in range(count)]

    def __len__(self) -> int:
        return len(self.described)

    def __iter__(self) -> Iterator[Any]:
        """Yield an array without data, of the micro-batch's shape and dtype, for each one."""
        return iter(self.described)

    def __getitem__(self, i: Any) -> Any:
        return self.read(i)


class Periodic(Mapping[Any, V]):
    """A table of the first micro-batches, by keys that end with one, read for all that follow: i modulo the period."""

    def __init__(self, table: Mapping[Any, V], period: int) -> None:
        self.table, self.period = table, period

    def __getitem__(self, key: Any) -> V:
        return self.table[*key[:-1], key[-1] % self.period]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


class EndlessLosses(np.ndarray):
    """The losses of a stream: those of micro-batches that are long ago make place for the next ones."""

    def __setitem__(self, i: Any, loss: Any) -> None:
        super().__setitem__(i % len(self), loss)


class VersionedReduction(Reduction):
    """The gradients of weights that change on the way: every update has summed its own (`WeightVersions`)."""

    def __init__(self, versions: WeightVersions) -> None:
        super().__init__()
        self.versions = versions

    def bind(self, comm: Comm, stages: Mapping[int, PipelineStage], tied: Sequence[str]) -> None:
        plan = self.versions.plan
        self.shared, self.reducers, self.early = self.versions.shared, {}, set()
        several = (n for n, ranks in plan.holders().items() if n in stages and len(ranks) > 1)
        if any(batch_norms(stages[n].module) for n in several):
            raise UsageError(
                f"plan {plan.name!r} updates a stage with batch normalisation on several ranks at different times,"
                " and its running statistics are those of all rows of one step; take a schedule that flushes, such as"
                " 1f1b"
            )

    def finish(self) -> None:
        self.versions.finish()


class VersionedPipeline(Pipeline):
    """A pipeline whose plan updates the weights on the way; `step` runs the whole plan, and leaves the latest version.

    versions: which weights each forward and backward uses, and when they change. period: of the paths of a stream's
    micro-batches, when a `Stream` runs it beyond the end of its plan. For the others see `Pipeline`.
    """

    updates_on_the_way = True  # PipeDream can show what goes wrong without stashing

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        loss: Loss | None,
        *,
        versions: WeightVersions,
        period: int | None = None,
        coordinates: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.versions, self.period = versions, period
        reduce = VersionedReduction(versions)
        super().__init__(comm, plan, stages, loss, reduce=reduce, coordinates=coordinates, observers=observers)
        self.added = plan.batch
        if period is not None:
            self.recomputed = Periodic(self.recomputed, period)

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        super().begin(inputs, targets)
        if self.period is not None:
            self.losses = self.losses.view(EndlessLosses)
        self.versions.begin(self.plan.microbatches)

    def know(self, shapes: Shapes, boundaries: Boundaries) -> None:
        super().know(shapes, boundaries)
        if self.period is not None:
            self.messages.routes = Periodic(self.messages.routes, self.period)

    # --- the versions of an action ---

    def compute(self, step: Step) -> None:
        # The update of the last backward comes before anything that may wait: other replicas wait for it.
        self.versions.update()
        if step.kind == "RECOMPUTE":
            self.versions.before_recompute(step.stage, step.microbatch)
        super().compute(step)

    def forward(self, stage: int, i: int, arrays: list[Any]) -> None:
        self.versions.before_forward(stage, i)
        super().forward(stage, i, arrays)

    def backward(self, stage: int, i: int, arrays: list[Any], weights: str) -> None:
        self.versions.before_backward(stage, i)
        super().backward(stage, i, arrays, weights)
        del arrays
        self.versions.after_backward(stage, i)

    def sum_gradients(self) -> None:
        self.versions.update()
        super().sum_gradients()
