"""The runtime: walks a rank's order and does what stands there. It knows no schedule; the plan is all it has.

    rank 0   0RECV_B0  0F0 0SEND_F0  0F1 0SEND_F1   0B0 ...
                          │             ▲
                          ▼             │ waits for the posted receive
    rank 1   1RECV_F0     1F0        1B0 1SEND_B0 ...

RECV posts a receive into a *fresh* buffer: the stage's first layer keeps its input for backward, so a buffer that is
used again would change a gradient behind its back. SEND starts; it is waited for when the plan says that it must have
arrived, so that 1F1B's memory is what the plan says (messages.py). Neighbours on one rank hand their arrays over. Every
plan is judged before anything runs, so a wrong one is a sentence and not a hang.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import numpy as np

from minidist.autograd import Tensor, flop_counter, no_grad
from minidist.base.errors import MismatchError, UsageError
from minidist.base.fingerprint import fingerprint
from minidist.base.random import batch_coordinates
from minidist.base.trace import purpose
from minidist.collectives import all_reduce, broadcast
from minidist.comm import Comm
from minidist.parallel import GradientReducer, Shard
from minidist.parallel.clock import advance_clock
from minidist.pipeline.passes import forwards, lower
from minidist.pipeline.plan import Action, Plan, actions_of, show
from minidist.pipeline.runtime.messages import Messages
from minidist.pipeline.runtime.norm import clip_grad_norm
from minidist.pipeline.runtime.shapes import Key, exchange_shapes, has_gradient, signature
from minidist.pipeline.runtime.shared import SharedGradients
from minidist.pipeline.runtime.shared_shards import SharedShards
from minidist.pipeline.runtime.stages import PipelineStage
from minidist.pipeline.runtime.walk import backward_from, by_target, gradient_of, leaf
from minidist.pipeline.times import Times
from minidist.pipeline.validate import validate

Loss = Callable[[Any, Any], Tensor]  # (output of the last stage, target of the micro-batch) -> its part of the loss


class Pipeline:
    """One rank's part of a pipeline: `step(inputs, targets)` runs the whole plan once and leaves the gradients.

    stages: this rank's stages, exactly those that the plan gives it. loss: called on the last stage; it divides by the
    global count itself, because micro-batches' losses and gradients are summed. tied: names of parameters that several
    stages share.
    data: communicator of the data axis; gradients are then summed over it too (`reduction`: all-reduce algorithm).
    reducers: of each stage, when somebody else (ZeRO) has made them; reduce_each: backward itself tells them, in each
    micro-batch (ZeRO 2). shards: of each stage, where gradients are sharded; replicas are then added shard by shard.
    prefetch: receives posted ahead. coordinates: micro-batch -> context in which its passes run (`batch_coordinates`).
    times: seconds by which actions advance a virtual clock, for teaching; by default what a FlopCounter counted does.

    Sends, per step and border between two ranks: each micro-batch's activation (purpose pipeline_activation) and its
    gradient (pipeline_gradient); shared gradients (tied, gradient_reduce); and the losses, 8 B a micro-batch (metrics).
    Raises PlanError for a wrong plan, UsageError for stages or inputs that do not fit it, MismatchError when ranks have
    different plans.
    """

    UPDATES: tuple[str, ...] = ("flush", "none")  # of the plans that it runs

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        loss: Loss | None,
        *,
        tied: Sequence[str] = (),
        data: Comm | None = None,
        reduction: str = "ring",
        reducers: Mapping[int, Sequence[GradientReducer]] | None = None,
        reduce_each: bool = False,
        shards: Mapping[int, Sequence[Shard]] | None = None,
        prefetch: int = 1,
        coordinates: Callable[[int], AbstractContextManager[Any]] | None = None,
        times: Times | None = None,
    ) -> None:
        validate(plan, allow_wrong_gradients=plan.updates in self.UPDATES)  # PipeDream can show what goes wrong
        if plan.updates not in self.UPDATES:
            way = (
                "updates its weights on the way; run it with PipeDream"
                if "flush" in self.UPDATES
                else "updates them once; run it with Pipeline"
            )
            raise UsageError(f"plan {plan.name!r} {way}")
        if plan.ranks != comm.size:
            raise UsageError(
                f"plan {plan.name!r} is for {plan.ranks} ranks and there are {comm.size}; start {plan.ranks} ranks"
            )
        self.comm, self.loss, self.times, self.reduction, self.prefetch = comm, loss, times, reduction, prefetch
        self.coordinates = coordinates or (lambda i: nullcontext())
        self.stages = {stage.number: stage for stage in stages}
        if sorted(self.stages) != plan.stages_of(comm.rank):
            raise UsageError(
                f"rank {comm.rank}: plan {plan.name!r} gives it stages {plan.stages_of(comm.rank)} and it was built"
                f" with {sorted(self.stages)}; build the stages of Plan.stages_of(rank)"
            )
        self.flats = [flat for stage in self.stages.values() for flat in stage.flats]
        self._follow(plan)
        self._same_plan()
        parameters = {n: stage.parameters for n, stage in self.stages.items()}
        if shards is None:
            self.shared = SharedGradients(comm.dup(), parameters, tied)
        else:
            self.shared = SharedShards(comm.dup(), parameters, tied, shards)
        self.reduce_each = reduce_each
        self.reducers: dict[int, list[GradientReducer]] = {n: list(given) for n, given in (reducers or {}).items()}
        if data is not None and data.size > 1:
            for n, stage in sorted(self.stages.items()):
                self.reducers[n] = [
                    GradientReducer(flat, data.dup(), algorithm=reduction, unused="zeros")
                    for flat in stage.flats
                    if len(flat)
                ]
        self._seen: Any = None

    def _follow(self, plan: Plan) -> None:
        self.plan = plan if plan.is_lowered else lower(plan, self.prefetch)
        orders = [[actions_of(item) for item in order] for order in self.plan.orders]
        home = self.plan.rank_of_stage()
        self.order, self.names = orders[self.comm.rank], [show(item) for item in self.plan.orders[self.comm.rank]]
        self.recomputed = {(a.stage, a.microbatch) for item in self.order for a in item if a.kind == "RECOMPUTE"}
        self.messages = Messages(self.comm, self.plan, orders, home)

    def forwards(self, loss: Loss) -> "Pipeline":
        """The same stages on the same ranks, forward only: its `step` returns losses, keeps nothing and leaves
        gradients alone.

        Every rank calls it, after a step: it knows the shapes that this one has learned, and sends nothing for them.
        """
        result = copy(self)
        result.loss = loss
        result._follow(forwards(self.plan))
        result.messages.know(self.messages.borders)
        return result

    # --- a step ---

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the plan on micro-batches `inputs`; returns every micro-batch's loss, on every rank.

        Every rank passes the micro-batches (arrays; their first dims may differ), the first stage reads the inputs, the
        last the targets. Gradients are added to what the parameters have; call `zero_grad` before.
        """
        self._enter(inputs, targets)
        self._run_items(0, len(self.order))
        self._sum_gradients()
        with purpose("metrics"):
            # type: ignore[union-attr]
            return [float(value) for value in all_reduce(self.comm, self.losses, algorithm="ordered")]

    def _enter(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        self._check(inputs, targets)
        now = [signature(value) for value in inputs]
        if now != self._seen:
            self.messages.know(exchange_shapes(self.comm, self.messages.home, self.plan.stages, inputs, self._dry_run))
            self._seen = now
        self.inputs, self.targets = inputs, targets
        self.losses = np.zeros(self.plan.microbatches)
        self.messages.begin()
        self.alive: dict[Key, tuple[list[Any], Any]] = {}  # leaves, and outputs by the stage that they go to
        self.deferred: dict[Key, Any] = {}

    def _run_items(self, first: int, last: int) -> None:
        """The items first..last-1 of this rank's order."""
        for at in range(first, last):
            item = self.order[at]
            if len(item) == 2:  # an overlapped pair begins when both have what they need
                for action in item:
                    self._receive(action)
            for action in item:
                self._do(action, self.names[at])
            self.messages.after(at)

    def _sum_gradients(self) -> None:
        """What is summed when all actions are done: shared parameters over their places, then everything over the
        replicas.
        """
        self.messages.finish()
        if self.plan.updates != "none":
            self.shared.add()
            if not self.reduce_each:
                self._reduce([n for n in self.reducers if n in self.shared.stages])
                self._finish(list(self.reducers))
            self.shared.mark_added()

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's stages."""
        for flat in self.flats:
            flat.zero_grad()

    def clip_grad_norm_(self, max_norm: float, optimizer: Any = None) -> float:
        """Clip by the norm over all stages; a shared parameter counts once. Each rank sends its block sums (purpose
        clip_norm).

        The norm is that of one slice a stage in stage order, its first place holding what is shared: bitwise the same
        everywhere.
        """
        return clip_grad_norm(self, max_norm, optimizer)

    # --- one action ---

    def _do(self, action: Action, name: str) -> None:
        kind, stage, i = action.kind, action.stage, action.microbatch
        match kind:
            case "RECV_F" | "RECV_B":
                self.messages.post(action)
            case "SEND_F" | "SEND_B":
                self.messages.send(action)
            case "REDUCE_GRAD":
                self._reduce(
                    [stage]
                    if stage in self.reducers and stage not in self.shared.stages and not self.reduce_each
                    else []
                )
            case _:
                self._receive(action)
                with self.coordinates(i):
                    if kind == "F":
                        self._forward(stage, i)
                    elif kind == "RECOMPUTE":
                        leaves, _ = self.alive[stage, i]
                        self.alive[stage, i] = leaves, self._run(stage, i, leaves)
                    elif kind == "W":
                        work = self.deferred.pop((stage, i))
                        if work is not None:
                            work.run()
                    else:
                        self._backward(stage, i, "now" if kind == "B" else "deferred")
                if (
                    self.reduce_each and kind == "W"
                ):  # the end of a pass, where a reducer finishes by itself, was before this
                    self._finish([stage])
                self._advance(action, name)

    def _receive(self, action: Action) -> None:
        """Wait for what an F, I or B needs."""
        if action.kind in ("F", "I", "B"):
            self.messages.receive("F" if action.kind == "F" else "B", action.stage, action.microbatch)

    def _forward(self, stage: int, i: int) -> None:
        if stage == 0:
            leaves = [Tensor(self.inputs[i]) if has_gradient(self.inputs[i].dtype) else self.inputs[i]]
        else:
            sources = self.messages.borders.into[stage, i]
            leaves = [leaf(array) for source in sources for array in self.messages.take("F", source, stage, i)]
        keeps = self.plan.updates != "none"
        with nullcontext() if keeps and (stage, i) not in self.recomputed else no_grad():
            outputs = self._run(stage, i, leaves)
        if keeps:
            self.alive[stage, i] = leaves, None if (stage, i) in self.recomputed else outputs
        if stage + 1 == self.plan.stages:
            (output,) = outputs[stage + 1][:1]
            self.losses[i] = output.item() if output.size == 1 else 0.0
            return
        for target, tensors in outputs.items():
            self.messages.hand_over("F", stage, target, i, [tensor.data for tensor in tensors])

    def _run(self, stage: int, i: int, leaves: list[Any]) -> dict[int, list[Tensor]]:
        result = self.stages[stage].module(*leaves)
        if stage + 1 == self.plan.stages and self.loss is not None:
            assert self.targets is not None
            result = self.loss(result, self.targets[i])
        return by_target(result, stage)

    def _backward(self, stage: int, i: int, weights: str) -> None:
        leaves, outputs = self.alive.pop((stage, i))
        if stage + 1 == self.plan.stages:
            roots, gradients = outputs[stage + 1], [None] * len(outputs[stage + 1])
        else:
            targets = self.messages.borders.out[stage, i]
            roots = [output for target in targets for output in outputs[target] if has_gradient(output.dtype)]
            gradients = [array for target in targets for array in self.messages.take("B", target, stage, i)]
        work = backward_from(roots, gradients, weights)
        if weights == "deferred":
            self.deferred[stage, i] = work
        at = 0
        for source in self.messages.borders.into[stage, i] if stage else []:
            count = len(self.messages.borders.meta[source, stage, i])
            floats = [one for one in leaves[at : at + count] if has_gradient(one.dtype)]
            self.messages.hand_over("B", stage, source, i, [gradient_of(one) for one in floats])
            at += count

    def _reduce(self, numbers: list[int]) -> None:
        """Start the sum over the data axis of complete stages: all buckets, in order."""
        for reducer in (reducer for number in numbers for reducer in self.reducers.get(number, [])):
            for parameter in reversed(reducer.flat.parameters):
                if parameter.requires_grad:
                    parameter.zero_fill() if parameter.grad is None else None
                    reducer.ready(parameter)

    def _finish(self, numbers: list[int]) -> None:
        for reducer in (reducer for number in numbers for reducer in self.reducers.get(number, [])):
            reducer.finish()

    def _advance(self, action: Action, name: str) -> None:
        if self.times is not None:
            kind, stage = action.kind, action.stage
            f, x, w = self.times.F[stage], self.times.I[stage], self.times.W[stage]
            seconds = {"F": f, "RECOMPUTE": f, "I": x, "W": w, "B": x + w}[kind]
            self.comm.compute(seconds=seconds, name=str(action))
            return
        advance_clock(self.comm, str(action))

    # --- before it starts ---

    def _dry_run(self, stage: int, arrays: list[Any]) -> list[tuple[int, Any]]:
        leaves = arrays if stage == 0 and not has_gradient(arrays[0].dtype) else [Tensor(array) for array in arrays]
        with no_grad(), batch_coordinates(), self.coordinates(0):
            outputs = by_target(self.stages[stage].module(*leaves), stage)
        counted = flop_counter.get()
        if counted is not None:
            counted.take()
        return [(target, tensor.data) for target, tensors in outputs.items() for tensor in tensors]

    def _check(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        m = self.plan.microbatches
        if len(inputs) != m:
            raise UsageError(
                f"rank {self.comm.rank}: plan {self.plan.name!r} is for {m} micro-batches and got {len(inputs)};"
                f" give {m}"
            )
        if self.loss is None and self.plan.updates != "none":
            raise UsageError(f"plan {self.plan.name!r} runs backward and needs a loss; pass loss=")
        if self.loss is not None and (targets is None or len(targets) != m):
            raise UsageError(
                f"rank {self.comm.rank}: {m} micro-batches need {m} targets, got"
                f" {0 if targets is None else len(targets)}"
            )

    def _same_plan(self) -> None:
        mine = fingerprint(self.plan.to_csv())
        with purpose("startup"):
            theirs: Any = broadcast(self.comm, mine.copy())
        if not np.array_equal(mine, theirs):
            raise MismatchError(
                f"rank {self.comm.rank}: its plan differs from rank 0's; build the same plan on every rank"
            )
