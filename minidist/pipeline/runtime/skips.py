"""A pipeline with skip connections: a stage's output goes to a later stage directly, past the stages between them.

    stage 0 ────▶ stage 1 ────▶ stage 2 ────▶ stage 3        skips = [(0, 3)]
       └───────────── SkipConnection(3, y) ──────▲           once each way, whatever number of stages is between

Source: Kim et al., torchgpipe, arXiv:2004.09910, whose skip connections do not pass through the stages between, either.
Proved by: tests/pipeline/test_messages.py
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.base.half import named_dtype
from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.comm import Comm
from minidist.core.comm.communicator import Request
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.messages import MESSAGE, PURPOSES, TAGS, pack, signature, unpack
from minidist.core.pipeline.runtime.stages import PipelineStage
from minidist.nn.ops.function import Function
from minidist.pipeline.runtime.pipeline import Pipeline

Way = tuple[int, int, int]  # from stage, to stage, micro-batch


@dataclass(frozen=True)
class SkipConnection:
    """An output for `stage`, which is not the next one: it gets the tensor after those of the stage before it."""

    stage: int
    tensor: Tensor


class SkipPipeline(Pipeline):
    """A pipeline whose stages may return `SkipConnection(stage, tensor)` in addition to what the next stage gets.

    skips: (from stage, to stage) of each. A stage's module gets the tensors of the stage before it, then those of its
    skip connections in the order of the stages that they come from. For the others see `Pipeline`.

    Sends, in addition, each skip connection's activation and gradient of every micro-batch to a stage on another rank,
    each after a message of 640 B with its shape. When the shapes of an input are exchanged (startup), activations for
    stages before the last one are sent, too. Raises UsageError for skips that do not go forward past a stage, or need
    too many tags, and for a stage that returns other ones.
    """

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        *rest: Any,
        skips: Iterable[tuple[int, int]],
        **options: Any,
    ) -> None:
        self.pairs = sorted(skips)
        for source, target in self.pairs:
            if not 0 <= source < target - 1 < plan.stages - 1:
                raise UsageError(
                    f"a connection from stage {source} to stage {target} skips none of {plan.stages} stages; give pairs"
                    " (from, to) with a stage between them"
                )
        if plan.microbatches * len(self.pairs) > TAGS:
            raise UsageError(
                f"with {len(self.pairs)} skip connections at most {TAGS // len(self.pairs)} micro-batches fit, not"
                f" {plan.microbatches}; take fewer"
            )
        self.skips = comm.dup()
        super().__init__(comm, plan, stages, *rest, **options)
        for stage in self.stages.values():
            stage.module = _Skipping(self, stage)

    # --- a step ---

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        self.here: dict[tuple[str, Way], Any] = {}  # what goes to a stage on this rank, by its direction
        self.arrived: dict[Way, Tensor] = {}  # leaves, until their backward
        self.sent: dict[tuple[str, Way], list[Request]] = {}
        self.plan_runs = False
        super().begin(inputs, targets)
        # The plan begins without what a pass that learns shapes has left.
        self._wait_for_sends()
        self.here.clear()
        self.arrived.clear()
        self.plan_runs = True

    def outputs_of(self, stage: int, i: int, leaves: list[Any]) -> list[Tensor]:
        self.microbatch = i
        return super().outputs_of(stage, i, leaves)

    def run(self, stage: int, module: Any, leaves: Sequence[Any]) -> Any:
        """Return what a stage's module returns, without the skip connections, which are sent."""
        i = self.microbatch
        # A second forward (recomputation) begins at the same leaves.
        for way in [(source, target, i) for source, target in self.pairs if target == stage]:
            if way not in self.arrived:
                self.arrived[way] = Tensor(self._receive("F", way), requires_grad=True)
            leaves = [*leaves, self.arrived[way]]

        result = module(*leaves)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        skips = [output for output in outputs if isinstance(output, SkipConnection)]
        self._check_skips(stage, sorted(skip.stage for skip in skips))
        if not skips:
            return result
        first, *others = (output for output in outputs if not isinstance(output, SkipConnection))
        for skip in skips:
            first = _Departure.apply(first, skip.tensor, self, (stage, skip.stage, i))
        return [first, *others]

    def _check_skips(self, stage: int, found: list[int]) -> None:
        """Raise UsageError unless a stage has returned the skip connections that were given."""
        expected = [target for source, target in self.pairs if source == stage]
        if found != expected:
            raise UsageError(f"stage {stage} skips to stages {found}, and skips= has {expected}; give all of them")

    def backward(self, stage: int, i: int, arrays: list[Any], weights: str) -> None:
        # Take the gradients of what was sent, which has arrived then; a stage that trains nothing takes them, too.
        self.gradients: dict[Way, Any] = {}
        for way in [(source, target, i) for source, target in self.pairs if source == stage]:
            self.gradients[way] = self._receive("B", way)
            self.comm.waitall(self.sent.pop(("F", way), []))
        super().backward(stage, i, arrays, weights)
        for way in [way for way in self.arrived if way[1:] == (stage, i)]:
            leaf = self.arrived.pop(way)
            self.send("B", way, xp.zeros(leaf.shape, leaf.dtype, leaf.data) if leaf.grad is None else leaf.grad)

    def sum_gradients(self) -> None:
        self._wait_for_sends()
        super().sum_gradients()

    # --- messages ---

    def _wait_for_sends(self) -> None:
        while self.sent:
            self.comm.waitall(self.sent.popitem()[1])

    def send(self, direction: str, way: Way, array: Any) -> None:
        """Send an activation ("F") or a gradient ("B") past stages, once: a second forward sends nothing."""
        source, target, i = way
        # The shapes of the last stage's outputs need not be learned, so it does not run before the plan does.
        if target + 1 == self.plan.stages and not self.plan_runs:
            return
        rank = self.messages.rank_of[target if direction == "F" else source, i]
        if rank == self.comm.rank:
            self.here[direction, way] = array
        elif (direction, way) not in self.sent:
            array, tag = array if array.flags.c_contiguous else array.copy(), self._tag(way)
            with purpose(PURPOSES[direction]):
                told = self.skips.isend(pack([signature(array)]), rank, tag)
                self.sent[direction, way] = [told, self.skips.isend(array, rank, tag)]

    def _receive(self, direction: str, way: Way) -> Any:
        source, target, i = way
        rank = self.messages.rank_of[source if direction == "F" else target, i]
        if rank == self.comm.rank:
            return self.here.pop((direction, way))
        rows, tag = np.empty(MESSAGE // 8, np.int64), self._tag(way)
        with purpose(PURPOSES[direction]):
            self.skips.recv(rows, rank, tag)
            ((shape, dtype),) = unpack(rows)
            array = xp.empty(shape, named_dtype(dtype))
            self.skips.recv(array, rank, tag)
        return array

    def _tag(self, way: Way) -> int:
        return self.pairs.index(way[:2]) + len(self.pairs) * way[2]


class _Skipping:
    """A stage's module in a pipeline with skip connections; its attributes are the module's."""

    def __init__(self, pipe: SkipPipeline, stage: PipelineStage) -> None:
        self.pipe, self.number, self.module = pipe, stage.number, stage.module

    def __call__(self, *leaves: Any) -> Any:
        return self.pipe.run(self.number, self.module, leaves)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Departure(Function):
    """Returns the next stage's tensor unchanged. Forward sends a skip connection; backward takes its gradient."""

    @staticmethod
    def forward(ctx: Any, following: Any, tensor: Any, pipe: SkipPipeline, way: Way) -> Any:
        ctx.pipe, ctx.way = pipe, way
        pipe.send("F", way, tensor)
        return following[...]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, ctx.pipe.gradients[ctx.way]
