"""Bugs of pipelines: buffers of micro-batches, the order of actions, and weights that two stages share.

Proved by: tests/museum/test_museum.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import cross_entropy
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.errors import MinidistError
from minidist.core.comm import Comm
from minidist.core.nn import GPT, GPTConfig
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime import messages, reduction, split_model
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch, Recording, replaces
from minidist.optim import SGD
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.runtime.post_validation import PostValidation
from minidist.pipeline.schedules import from_text, get_schedule
from minidist.pipeline.validate import validate

# Rank 1 sends a gradient before it takes the next activation; rank 0 sends that activation before it takes the
# gradient.
CROSSED = "rank 0: 2SEND_F1 0F2 0SEND_F2 2RECV_B0\nrank 1: 3RECV_F1 3SEND_B0 3F1 3B1 1RECV_F2\n"


def one_receive_buffer(patch: Patch) -> None:
    """a stage receives every micro-batch into the same buffer, which its first layer still holds as its saved input"""
    buffers: dict[Any, Any] = {}

    class Shared:
        def __getattr__(self, name: str) -> Any:
            return getattr(xp, name)

        @staticmethod
        def empty(shape: Any, dtype: Any) -> Any:
            return buffers.setdefault((shape, str(dtype)), np.empty(shape, dtype))

    patch.setattr(messages, "xp", Shared())


def data_axis_before_tied(patch: Patch) -> None:
    """replicas are summed before the copies of the tied embedding are"""
    add, step = reduction.SharedGradients.add, Pipeline.step
    patch.setattr(reduction.SharedGradients, "add", lambda self: None)

    def late(self: Any, *batches: Any) -> Any:
        losses = step(self, *batches)
        add(self.reduce.shared)
        return losses

    patch.setattr(Pipeline, "step", late)


def tied_copies_apart(patch: Patch) -> None:
    """each copy of the tied embedding keeps the gradient of one site"""
    patch.setattr(reduction.SharedGradients, "add", lambda self: None)


@replaces(messages.Messages, "exchange_shapes")
def largest_buffer(right: Any, self: Any, inputs: Any, run: Any) -> Any:
    """all micro-batches are received into buffers of the first one's size"""
    found = right(self, inputs, run)
    return {(stage, i): found.get((stage, 0), tensors) for (stage, i), tensors in found.items()}


@replaces(PostValidation, "_coefficient")
def overflow_seen_by_one_stage(right: Any, self: Any, squares: float) -> Any:
    """each rank looks at its own gradients: the one with the overflow reverts its step, the others keep theirs"""
    return right(self, float(sum(blocks.sum() for blocks in self._sums.values())))


def plan_text() -> str:
    """Return the plan of two ranks that `validated` passes to the validator."""
    return str(get_schedule("1f1b").plan(2, 3).to_text())


def crossed_sends(patch: Patch) -> None:
    """two ranks send to each other before either receives"""
    patch.setitem(globals(), "plan_text", lambda: CROSSED)


def numbered_from_one(patch: Patch) -> None:
    """the last rank's forwards are F1, F2, F3 where they should be F0, F1, F2"""
    right = get_schedule("1f1b").plan(2, 3).to_text().splitlines()
    last = right[-1].replace("1F2", "1F3").replace("1F1", "1F2").replace("1F0", "1F1")
    patch.setitem(globals(), "plan_text", lambda: "\n".join([*right[:-1], last]))


def validated() -> Recording:
    """Validate the plan: it must be complete, and in an order that can run whether sends wait or not."""
    validate(from_text(plan_text()))
    return Recording([], [])


def two_stages(comm: Comm, plan: Plan, rows: int, kind: type[Pipeline] = Pipeline) -> Pipeline:
    """Return a pipeline of a GPT on two ranks. rows: of the batch; the loss is the mean over their tokens."""
    model = GPT(GPTConfig(jobs.WORDS, jobs.LENGTH, 16, 2, 4), dtype=np.float64, seed=3)
    stages, tied = split_model(model, plan.stages, plan.stages_of(comm.rank))
    return kind(comm, plan, stages, lambda y, t: cross_entropy(y, t, rows * jobs.LENGTH), tied=tied)


def weights_of(pipe: Pipeline) -> dict[str, Array]:
    """Return copies of the weights of this rank's stages, by name."""
    return {p.name: p.data.copy() for flat in pipe.flats for p in flat.parameters}


@jobs.on_ranks(2)
def ragged(comm: Comm) -> Any:
    """Train a pipeline of two stages; the last of three micro-batches has one row, the others two."""
    pipe = two_stages(comm, get_schedule("1f1b").plan(2, 3), 5)
    optimizers = [SGD(flat, lr=0.3) for flat in pipe.flats]
    losses = []
    for step in range(jobs.STEPS):
        pipe.zero_grad()
        inputs, targets = jobs.tokens(step, 5)
        # 5 rows: the last micro-batch has one, the others two.
        cut = [slice(0, 2), slice(2, 4), slice(4, 5)]
        losses.append(sum(pipe.step([inputs[c] for c in cut], [targets[c] for c in cut])))
        for optimizer in optimizers:
            optimizer.step()
    return losses, {"weights": weights_of(pipe)}


class OverflowsOnRank0(Pipeline):
    """A pipeline in which, in the second step, one gradient of rank 0 alone is infinite."""

    summed = 0  # steps

    def sum_gradients(self) -> None:
        super().sum_gradients()
        self.summed += 1
        if self.comm.rank == 0 and self.summed == 2:
            self.flats[0].grad[0] = np.inf


@jobs.on_ranks(2)
def overflows(comm: Comm) -> Any:
    """Train a pipeline of two stages that steps before the norm is known; the second step overflows on one of them."""
    pipe = two_stages(comm, get_schedule("zb-h1").plan(2, 2), 4, OverflowsOnRank0)
    # No wait for the norm: a step is made at once, and reverted when an overflow becomes known.
    trainer = PostValidation(pipe, lambda flat: SGD(flat, lr=0.3))
    for step in range(jobs.STEPS):
        inputs, targets = jobs.tokens(step, 4)
        trainer.step([inputs[:2], inputs[2:]], [targets[:2], targets[2:]])
    return [sum(outcome.losses) for outcome in trainer.finish()], {"weights": weights_of(pipe)}


def why_rejected(text: str) -> str:
    """Return why the validator rejects a plan, or ""."""
    try:
        validate(from_text(text))
    except MinidistError as error:
        return str(error)
    return ""
