"""The pipeline that users get: it extends the core's by the other actions of plans, and refuses what does not fit.

    0RECOMPUTE2              the second forward of micro-batch 2 on stage 0; the first one kept only its input
    (1F4;2B1)OVERLAP_F_B     two actions, which begin when both have what they need
    0F0 0F1 0F2              a plan without backwards, for evaluation: nothing is kept

An array that was sent is released when it has arrived (early_release.py). Observers see every computation.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from minidist.core.autograd import Tensor, no_grad
from minidist.core.base.trace import watchers
from minidist.core.comm import Comm, check_communicator
from minidist.core.pipeline.plan import Key, Plan
from minidist.core.pipeline.runtime import pipeline as core
from minidist.core.pipeline.runtime.messages import Boundaries, Message
from minidist.core.pipeline.runtime.pipeline import Loss, Shapes, Step
from minidist.core.pipeline.runtime.reduction import Reduction
from minidist.core.pipeline.runtime.stages import PipelineStage
from minidist.parallel.running_statistics import combine_statistics
from minidist.pipeline.runtime import refusals
from minidist.pipeline.runtime.early_release import arrived_messages

Observer = Callable[[Step], AbstractContextManager[Any]]  # a computation -> a context in which it runs


class Item(list[Step]):
    """An action of a rank's order, or a pair of actions that overlap.

    arrived: messages that this rank has sent, and that have arrived when the item is done.
    """

    def __init__(self, steps: Iterable[Step], arrived: Sequence[Message] = ()) -> None:
        super().__init__(steps)
        self.arrived = list(arrived)


class Pipeline(core.Pipeline):
    """One rank's part of a pipeline: `step(inputs, targets)` runs the whole plan once and leaves the gradients.

    stages: this rank's stages, exactly those that the plan gives it. loss: called on the last stage; it divides by the
    global count itself, because micro-batches' losses and gradients are summed. tied: names of parameters that several
    stages share. reduce: who sums gradients over the places of shared parameters, and over the replicas of a data axis.
    coordinates: micro-batch -> context in which its passes run (`batch_coordinates`). observers: each is called with a
    computation and returns a context in which it runs.

    Sends what the core's `Pipeline` sends, and broadcasts 16 B from rank 0 (startup). Raises PlanError for a wrong
    plan, UsageError for stages, inputs, losses or outputs that do not fit, MismatchError when ranks have different
    plans.
    """

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        loss: Loss | None,
        *,
        tied: Sequence[str] = (),
        reduce: Reduction | None = None,
        coordinates: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        observers: Sequence[Observer] = (),
    ) -> None:
        check_communicator(comm, "Pipeline")
        if not self.updates_on_the_way:
            refusals.check_flushes(plan)
        super().__init__(comm, plan, stages, loss, tied=tied, reduce=reduce, coordinates=coordinates)
        self.observers = observers
        self.flats = [flat for stage in self.stages.values() for flat in stage.flats]
        self.added = plan.microbatches  # how many losses are added
        recomputed = ((a.stage, a.microbatch) for item in self.order for a in item if a.kind == "RECOMPUTE")
        self.recomputed: Mapping[Key, None] = dict.fromkeys(recomputed)

    def agree(self, reduce: Reduction, tied: Sequence[str]) -> None:
        """Check that all ranks have the same plan, and tell them which parameters this one has (startup)."""
        refusals.check_same_plan(self.comm, self.plan)
        super().agree(reduce, tied)
        self.at_end = combine_statistics(self.stages, reduce.shared.comm, self.plan, reduce.data)

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        """Begin a step on these micro-batches; UsageError where an input, a target or the loss is missing."""
        # An evaluation may have no loss; targets are for the loss.
        m = self.plan.microbatches
        has_loss = self.plan.updates == "none" if self.loss is None else targets is not None and len(targets) == m
        if len(inputs) != m or not has_loss:
            refusals.refuse_batches(self, inputs, targets)
        super().begin(inputs, targets)

    def know(self, shapes: Shapes, boundaries: Boundaries) -> None:
        """Note what crosses stage boundaries, and which messages have arrived after each item of the order."""
        super().know(shapes, boundaries)
        self.boundaries = boundaries
        arrived = arrived_messages(self.messages)
        self.items = [Item(item, arrived.get(at, ())) for at, item in enumerate(self.order)]
        self.order = self.items

    def execute(self, order: Iterable[Sequence[Step]]) -> None:
        """Execute items one after the other, and after each one release the messages that have arrived."""
        messages = self.messages
        for item in order:
            # An overlapped pair starts when both of its actions have what they need.
            if len(item) == 2:
                for kind, stage, i, _ in item:
                    message = "F" if kind == "F" else "B", stage, i
                    if message in messages.posted:
                        messages.ready[message] = messages.take(message)

            super().execute((item,))
            for message in item.arrived if isinstance(item, Item) else ():
                self.comm.waitall(messages.sends.pop(message, []))

    def compute(self, step: Step) -> None:
        """Compute an action under the observers, and advance a virtual clock by what was counted in it."""
        with ExitStack() as contexts:
            for observer in self.observers:
                contexts.enter_context(observer(step))
            if step.kind == "RECOMPUTE":
                self.recompute(step)
            else:
                super().compute(step)

    def recompute(self, step: Step) -> None:
        """Run the second forward from the kept input, this time recorded."""
        _, stage, i, name = step
        with self.coordinates(i):
            leaves, _ = self.alive[stage, i]
            self.alive[stage, i] = leaves, self.outputs_of(stage, i, leaves)
        self.comm.advance_clock(name)

    def forward(self, stage: int, i: int, arrays: list[Any]) -> None:
        """Run a stage's forward; without a backward nothing is kept, and before a second forward only the input."""
        keeps, recomputes = self.plan.updates != "none", (stage, i) in self.recomputed
        with nullcontext() if keeps and not recomputes else no_grad():
            super().forward(stage, i, arrays)
        if not keeps:
            del self.alive[stage, i]
        elif recomputes:
            leaves, _ = self.alive[stage, i]
            self.alive[stage, i] = leaves, None

    def outputs_of(self, stage: int, i: int, leaves: list[Any]) -> list[Tensor]:
        """Return the outputs of a stage; of the last stage, the loss. UsageError for an output that is not a Tensor."""
        outputs = super().outputs_of(stage, i, leaves)
        # Losses are added, so none may be the mean over its own rows.
        if stage + 1 == self.plan.stages and self.loss is not None and len(outputs) == 1 and self.added > 1:
            node: Any = getattr(outputs[0], "node", None)
            if getattr(node, "over", None):
                refusals.refuse_mean(i, self.added)
        for value in outputs:
            # What a neighbour receives has a shape and a dtype: names, None and plain numbers have none.
            if not isinstance(value, Tensor):
                refusals.refuse_output(value, stage)
        return outputs

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's stages."""
        for flat in self.flats:
            flat.zero_grad()

    def sum_gradients(self) -> None:
        """Wait for what is on its way, and sum the gradients, where there are any, over their places and replicas."""
        if self.plan.updates == "none":
            self.messages.finish()
        else:
            super().sum_gradients()
            for combine in self.at_end:
                combine()

    def _dry_run(self, stage: int, i: int, arrays: list[Any]) -> list[Any]:
        """Return the outputs of a forward that keeps nothing, and forget the operations that watchers counted in it."""
        outputs = super()._dry_run(stage, i, arrays)
        for watcher in watchers.get():
            if watcher.operations is not None:
                watcher.operations = []
        return outputs
