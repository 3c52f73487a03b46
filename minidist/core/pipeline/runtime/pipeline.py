"""The runtime: executes a rank's order, action by action. It depends on the plan alone.

    rank 0   0RECV_B0  0F0 0SEND_F0  0F1 0SEND_F1  0B0 0RECV_B1 ...
                             │                      ▲
                             ▼                      │ waits for the posted receive
    rank 1   1RECV_F0       1F0 1RECV_F1  1B0 1SEND_B0  1F1 ...

Messages are in messages.py; neighbours on one rank pass their arrays by reference. `minidist.Pipeline` extends this
class by second forwards, actions that overlap and plans without backward; minidist/pipeline validates plans.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from minidist.core.autograd import Tensor, no_grad, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, check_communicator
from minidist.core.pipeline.plan import Key, Plan, actions_of, lower
from minidist.core.pipeline.runtime.messages import FLOATS, Boundaries, Messages, Orders
from minidist.core.pipeline.runtime.reduction import Reduction
from minidist.core.pipeline.runtime.stages import PipelineStage

Loss = Callable[[Any, Any], Tensor]  # (output of the last stage, target of the micro-batch) -> its part of the loss

SENDS = {"SEND_F": 1, "SEND_B": -1}  # the stage that a transfer goes to, relative to its own
Shapes = list[tuple[tuple[int, ...], np.dtype[Any]]]  # of the inputs of a step


class Step(NamedTuple):
    """An action of this rank's order, taken apart once."""

    kind: str
    stage: int
    microbatch: int
    name: str


Item = Sequence[Step]  # one action, or several that overlap


@lru_cache(maxsize=4)
def prepared(plan: Plan, allow_wrong_gradients: bool) -> tuple[Plan, Orders, Mapping[Key, int]]:
    """Return a valid plan with its transfers, its actions, and the rank of each (stage, micro-batch).

    It is kept for all ranks of a simulated world.
    """
    hooks.validate_plan(plan, allow_wrong_gradients)
    lowered = plan if plan.is_lowered else lower(plan)
    orders = [[actions_of(item) for item in order] for order in lowered.orders]
    return lowered, orders, lowered.rank_of_stage()


class Pipeline:
    """One rank's part of a pipeline: `step(inputs, targets)` runs the whole plan once and leaves the gradients.

    stages: this rank's stages, exactly those that the plan gives it. loss: called on the last stage; it divides by the
    global count itself, because micro-batches' losses and gradients are summed. tied: names of parameters that several
    stages share. reduce: who sums gradients over the places of shared parameters, and over the replicas of a data axis.
    coordinates: micro-batch -> context in which its passes run (`batch_coordinates`).

    Sends, per step and boundary between two ranks: each micro-batch's activation (purpose pipeline_activation) and its
    gradient (pipeline_gradient); shared gradients (tied, gradient_reduce); and the losses, 8 B per micro-batch
    (metrics). Raises PlanError for a wrong plan, UsageError for stages that do not fit it and for other actions.
    """

    updates_on_the_way = False  # may weights change before the plan ends?

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
    ) -> None:
        check_communicator(comm, "Pipeline")

        # [1] The plan: valid, for these ranks and for these stages.
        lowered, orders, rank_of = prepared(plan.with_orders(tuple(map(tuple, plan.orders))), self.updates_on_the_way)
        self.stages = {stage.number: stage for stage in stages}
        hooks.pipeline_refusals().check_fits(plan, comm, self.stages)
        self.comm, self.loss, self.coordinates = comm, loss, coordinates

        # [2] What each action does: computations and transfers in one order.
        self.plan = lowered
        own = orders[comm.rank]
        self.order: Sequence[Item] = [[Step(a.kind, a.stage, a.microbatch, str(a)) for a in item] for item in own]
        self.messages = Messages(comm, self.plan, orders, rank_of)
        self.shapes: Shapes = []

        # [3] What sums gradients over other ranks.
        self.reduce = Reduction() if reduce is None else reduce
        self.agree(self.reduce, tied)

    def agree(self, reduce: Reduction, tied: Sequence[str]) -> None:
        """Tell the other ranks which parameters this one has (startup)."""
        reduce.bind(self.comm, self.stages, tied)

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the plan on micro-batches `inputs`; returns every micro-batch's loss, on every rank.

        Every rank passes all micro-batches (arrays, whose first dims may differ). Gradients are added to what the
        parameters have; call `zero_grad` before.
        """
        # [1] Nothing is alive, nothing on its way.
        self.begin(inputs, targets)
        # [2] Warm-up, steady state and cool-down: the plan's order.
        self.execute(self.order)
        # [3] The gradients' sums over places and replicas.
        self.sum_gradients()
        # [4] The last stage's losses, on every rank.
        with purpose("metrics"):
            losses = all_reduce(self.comm, self.losses, algorithm="ordered")
        return np.asarray(losses).tolist()  # type: ignore[no-any-return]

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        """Begin a step on these micro-batches."""
        # Shapes of what will arrive, in the first step and whenever those of the inputs change.
        shapes = list(map(attrgetter("shape", "dtype"), inputs))
        if self.shapes != shapes:
            self.know(shapes, self.messages.exchange_shapes(inputs, self._dry_run))
        self.inputs, self.targets = inputs, targets
        self.losses = np.zeros(self.plan.microbatches)  # 0 where the last stage is elsewhere
        # Stages may differ (one of them may be frozen), the replicas of a stage may not.
        for n, reducers in self.reduce.reducers.items():
            for reducer in reducers:
                reducer.guard.forward_begins(self.stages[n].module)
        self.alive: dict[Key, tuple[list[Any], Any]] = {}  # leaves and outputs
        self.deferred: dict[Key, Any] = {}  # weight gradients that wait for their W

    def know(self, shapes: Shapes, boundaries: Boundaries) -> None:
        """Note what crosses stage boundaries in steps with inputs of these shapes."""
        self.shapes = shapes
        self.messages.know(boundaries)

    def execute(self, order: Iterable[Item]) -> None:
        """Execute items one after the other, each an action or several of them."""
        for step in chain.from_iterable(order):
            kind, stage, i, _ = step
            # Transfers: a receive into a fresh buffer is posted, a send is started.
            if kind in ("RECV_F", "RECV_B"):
                self.messages.post((kind[-1], stage, i))
            elif kind in SENDS:
                self.messages.send((kind[-1], stage + SENDS[kind], i))
            # The stage's gradients are complete: their sum over the replicas starts, unless others come before it.
            elif kind == "REDUCE_GRAD":
                if stage in self.reduce.early:
                    self.reduce.start(stage)
            else:
                self.compute(step)

    def compute(self, step: Step) -> None:
        """Compute an action, and advance a virtual clock by what was counted in it."""
        kind, stage, i, name = step
        with self.coordinates(i):
            # Forward: the output is enqueued, and what is kept for backward is kept in `alive` alone.
            if kind == "F":
                self.forward(stage, i, self.messages.take(("F", stage, i)) if stage else [self.inputs[i]])
            # Backward, of inputs and weights (B) or of inputs alone (I): as the forward, with gradients.
            elif kind in ("B", "I"):
                arrays = self.messages.take(("B", stage, i)) if stage + 1 < self.plan.stages else []
                self.backward(stage, i, arrays, "now" if kind == "B" else "deferred")
                del arrays
            # Weight backward: the weight gradients that I left.
            elif kind == "W":
                if (work := self.deferred.pop((stage, i))) is not None:
                    work.run()
                # A reducer finishes by itself at the end of a pass, but that pass (I) is over.
                for reducer in self.reduce.reducers.get(stage, ()) if self.reduce.each else ():
                    reducer.finish()
            else:
                raise UsageError(f"the core's Pipeline does not run {name}; use minidist.Pipeline, which does")
        self.comm.advance_clock(name)

    def sum_gradients(self) -> None:
        """Wait for what is on its way, and sum the gradients over their places and replicas."""
        self.messages.finish()
        self.reduce.finish()

    def forward(self, stage: int, i: int, arrays: list[Any]) -> None:
        """Run a stage's forward of micro-batch i on what arrived, and enqueue its outputs or note its loss."""
        # The graph begins at what arrived: float inputs of a later stage get a gradient, tokens do not.
        leaves: list[Any] = []
        for array in arrays:
            floats = array.dtype.kind in FLOATS
            leaves.append(Tensor(array, requires_grad=floats and stage > 0) if floats or stage > 0 else array)
        outputs = self.outputs_of(stage, i, leaves)
        self.alive[stage, i] = leaves, outputs

        # The last stage ends in the loss; every other one enqueues its outputs for the next one.
        if stage + 1 == self.plan.stages:
            output = outputs[0].data
            self.losses[i] = output.item() if output.size == 1 else 0.0
        else:
            self.messages.enqueue(("F", stage + 1, i), list(map(attrgetter("data"), outputs)))

    def outputs_of(self, stage: int, i: int, leaves: list[Any]) -> list[Tensor]:
        """Return the outputs of a stage; of the last stage, the loss."""
        result = self.stages[stage].module(*leaves)
        if stage + 1 == self.plan.stages and self.loss is not None:
            assert self.targets is not None
            result = self.loss(result, self.targets[i])
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def backward(self, stage: int, i: int, arrays: list[Any], weights: str) -> None:
        """Run a stage's backward of micro-batch i with the gradients that arrived, and enqueue those of its inputs.

        weights: "now", or "deferred" until W.
        """
        # Roots: the loss, or the float outputs in the order in which their gradients arrived.
        leaves, outputs = self.alive.pop((stage, i))
        work = backward_from(outputs, arrays if stage + 1 < self.plan.stages else [None], weights)
        if weights == "deferred":
            self.deferred[stage, i] = work

        # The gradients of the leaves go back to the stage that these came from; zeros where this one used none.
        if stage:
            gradients = []
            for leaf in leaves:
                if leaf.dtype.kind in FLOATS:
                    gradients.append(xp.zeros(leaf.shape, leaf.dtype, leaf.data) if leaf.grad is None else leaf.grad)
            self.messages.enqueue(("B", stage - 1, i), gradients)

    def _dry_run(self, stage: int, i: int, arrays: list[Any]) -> list[Any]:
        """Return the outputs of a stage as arrays, from a forward that keeps nothing."""
        leaves = arrays if stage == 0 and arrays[0].dtype.kind not in FLOATS else [Tensor(array) for array in arrays]
        with no_grad(), hooks.batch_coordinates(), self.coordinates(0):
            outputs = self.outputs_of(stage, i, leaves)
        return [output.data for output in outputs]


def backward_from(outputs: Sequence[Tensor], gradients: Sequence[Any], weights: str) -> Any:
    """Run backward from several outputs in one pass, which visits what they share once.

    gradients: of those that are floats. weights: "now" or "deferred"; deferred weight gradients are returned.
    """
    roots, seeds, following = list[Tensor](), [], iter(gradients)
    for output in outputs:
        if output.dtype.kind in FLOATS:
            seed = next(following)
            if output.node is not None:
                roots.append(output)
                seeds.append(seed)
    if not roots:
        return None  # nothing in the stage is trained and nothing before it either
    if len(roots) == 1:
        return roots[0].backward(seeds[0], weight_gradients=weights)
    # Several outputs as one root. A view, because the gradient is the array of a message.
    edges = [(root, lambda _, seed=seed: seed[...]) for root, seed in zip(roots, seeds, strict=True)]
    return record("outputs", np.zeros((), roots[0].dtype), edges, cost=0).backward(weight_gradients=weights)
