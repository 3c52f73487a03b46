"""The runtime: walks a rank's order and does what stands there. It knows no schedule; the plan is all it has.

    rank 0   0RECV_B0  0F0 0SEND_F0  0F1 0SEND_F1   0B0 ...
                          │             ▲
                          ▼             │ waits for the posted receive
    rank 1   1RECV_F0     1F0        1B0 1SEND_B0 ...

RECV posts a receive into a *fresh* buffer: the stage's first layer keeps its input for backward, so a buffer that is used again
would change a gradient behind its back. SEND starts; that of an activation is waited for when its gradient has come back, so
that 1F1B's memory is what the plan says, that of a gradient at the end of the step. Neighbours on one rank hand
their arrays over. Every plan is judged before anything runs, so a wrong one is a sentence and not a hang.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from minidist.autograd import Function, Tensor, no_grad
from minidist.autograd import meter as current_meter
from minidist.base.errors import MismatchError, UsageError
from minidist.base.half import is_floating
from minidist.base.memory import track
from minidist.base.random import batch_coordinates
from minidist.base.trace import purpose
from minidist.collectives import all_reduce, broadcast
from minidist.comm import Comm
from minidist.optim import block_square_sums, clip_by_norm_, norm_from_blocks
from minidist.parallel import GradientReducer
from minidist.pipeline.passes import lower
from minidist.pipeline.plan import Action, Plan, parts, show, unpack
from minidist.pipeline.runtime.shapes import Key, Meta, exchange_shapes, signature
from minidist.pipeline.runtime.shared import SharedGradients
from minidist.pipeline.runtime.stages import PipelineStage
from minidist.pipeline.timing import Times
from minidist.pipeline.validate import validate

Loss = Callable[[Any, Any], Tensor]  # (output of the last stage, target of the micro-batch) -> its part of the loss
LARGEST_TAG = 2**14


class Pipeline:
    """One rank's part of a pipeline: `step(inputs, targets)` runs the whole plan once and leaves the gradients.

    stages: this rank's stages, exactly those that the plan gives it. loss: called on the last stage; it divides by the global
    count itself, because micro-batches' losses and gradients are summed. tied: names of parameters that several stages share.
    data: communicator of the data axis; gradients are then summed over it too (`reduction`: all-reduce algorithm). prefetch:
    receives posted ahead. coordinates: micro-batch -> context in which its passes run (`batch_coordinates`). times: seconds by
    which actions advance a virtual clock, for teaching; by default what a Meter counted does.

    Sends, per step and border between two ranks: each micro-batch's activation (purpose pipeline_activation) and its gradient
    (pipeline_gradient); shared gradients (tied, gradient_reduce); and the losses, 8 B a micro-batch (metrics). Raises PlanError
    for a wrong plan, UsageError for stages or inputs that do not fit it, MismatchError when ranks have different plans.
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
        prefetch: int = 1,
        coordinates: Callable[[int], AbstractContextManager[Any]] | None = None,
        times: Times | None = None,
    ) -> None:
        validate(plan, allow_wrong_gradients=plan.updates in self.UPDATES)  # PipeDream can show what goes wrong
        if plan.updates not in self.UPDATES:
            way = "updates its weights on the way; run it with PipeDream" if "flush" in self.UPDATES else "updates them once; run it with Pipeline"
            raise UsageError(f"plan {plan.name!r} {way}")
        if plan.ranks != comm.size:
            raise UsageError(f"plan {plan.name!r} is for {plan.ranks} ranks and there are {comm.size}; start {plan.ranks} ranks")
        self.comm, self.loss, self.times, self.reduction = comm, loss, times, reduction
        self.plan = plan if plan.is_lowered else lower(plan, prefetch)
        self.coordinates = coordinates or (lambda i: nullcontext())
        self.stages = {stage.number: stage for stage in stages}
        if sorted(self.stages) != plan.stages_of(comm.rank):
            raise UsageError(
                f"rank {comm.rank}: plan {plan.name!r} gives it stages {plan.stages_of(comm.rank)} and it was built with "
                f"{sorted(self.stages)}; build the stages of Plan.stages_of(rank)"
            )
        self.home: dict[Key, int] = {}
        for rank, order in enumerate(plan.orders):
            for action in (unpack(part) for item in order for part in parts(item)):
                self.home.setdefault(action[1:], rank) if action.kind == "F" else None
        self.order = [[unpack(part) for part in parts(item)] for item in self.plan.orders[comm.rank]]
        self.names = [show(item) for item in self.plan.orders[comm.rank]]
        self.recomputed = {action[1:] for item in self.order for action in item if action.kind == "RECOMPUTE"}
        self.flats = [stage.flat for stage in self.stages.values()]
        self._same_plan()
        self.shared = SharedGradients(comm.dup(), {n: stage.flat.parameters for n, stage in self.stages.items()}, tied)
        self.reducers = {
            n: GradientReducer(stage.flat, data.dup(), algorithm=reduction, unused="zeros")
            for n, stage in sorted(self.stages.items())
            if data is not None and data.size > 1 and len(stage.flat)
        }
        self._tags = self._number_messages()
        self._seen: Any = None
        self._entering: dict[Key, Meta] = {}

    # --- a step ---

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the plan on micro-batches `inputs`; returns every micro-batch's loss, on every rank.

        Every rank passes the micro-batches (arrays; their first dims may differ), the first stage reads the inputs, the last the
        targets. Gradients are added to what the parameters have; call `zero_grad` before.
        """
        self._check(inputs, targets)
        now = [signature(value) for value in inputs]
        if now != self._seen:
            self._entering = exchange_shapes(self.comm, self.home, self.plan.stages, inputs, self._dry_run)
            self._seen = now
        self.inputs, self.targets = inputs, targets
        self.losses = np.zeros(self.plan.microbatches)
        self.posted: dict[tuple[str, int, int], list[Any]] = {}  # receives by (kind, stage, micro-batch)
        self.ready: dict[tuple[str, int, int], list[Any]] = {}  # arrays for or from a stage: ("F" | "B", stage, micro-batch)
        self.alive: dict[Key, tuple[list[Any], Any]] = {}
        self.deferred: dict[Key, Any] = {}
        self.sends: dict[Action, list[Any]] = {}
        for name, item in zip(self.names, self.order, strict=True):
            if len(item) == 2:  # an overlapped pair begins when both have what they need
                for action in item:
                    self._receive(action)
            for action in item:
                self._do(action, name)
        for requests in self.sends.values():
            self.comm.waitall(requests)
        if self.plan.updates != "none":
            self.shared.add()
            self._reduce([n for n in self.reducers if n in self.shared.stages])
            for reducer in self.reducers.values():
                reducer.finish()
        with purpose("metrics"):
            return [float(value) for value in all_reduce(self.comm, self.losses, algorithm="ordered")]  # type: ignore[union-attr]

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's stages."""
        for flat in self.flats:
            flat.zero_grad()

    def clip_grad_norm_(self, max_norm: float, optimizer: Any = None) -> float:
        """Clip by the norm over all stages; a shared parameter counts once. Each rank sends its block sums (purpose clip_norm).

        The norm is that of one slice a stage in stage order, its first place holding what is shared: bitwise the same everywhere.
        optimizer: as for `optim.clip_by_norm_`.
        """
        mine: dict[int, Any] = {}
        for number, stage in self.stages.items():
            own = [p for p in stage.flat.parameters if p.requires_grad and (number, self.comm.rank, p.name) not in self.shared.copies]
            whole = [np.zeros(0), *(np.zeros(p.size) if p.grad is None else p.grad.reshape(-1) for p in own)]
            mine[number] = block_square_sums(np.concatenate(whole[1:] or whole))
        with purpose("clip_norm"):
            holders = self.plan.holders()
            order = [(stage, rank) for stage, ranks in holders.items() for rank in ranks]
            counts = np.zeros(len(order))
            for at, (number, rank) in enumerate(order):
                counts[at] = len(mine[number]) if rank == self.comm.rank else 0
            counts = np.asarray(all_reduce(self.comm, counts, algorithm="ordered"))
            blocks = np.zeros(int(counts.sum()))
            starts = np.concatenate([[0], np.cumsum(counts)]).astype(int)
            for at, (number, rank) in enumerate(order):
                if rank == self.comm.rank:
                    blocks[starts[at] : starts[at + 1]] = mine[number]
            blocks = np.asarray(all_reduce(self.comm, blocks, algorithm="ordered"))
        return clip_by_norm_(self.flats, norm_from_blocks(blocks), max_norm, optimizer)

    # --- one action ---

    def _do(self, action: Action, name: str) -> None:
        kind, stage, i = action
        match kind:
            case "RECV_F" | "RECV_B":
                self._post(action)
            case "SEND_F" | "SEND_B":
                self._send(action)
            case "REDUCE_GRAD":
                self._reduce([stage] if stage in self.reducers and stage not in self.shared.stages else [])
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
                self._advance(action, name)

    def _forward(self, stage: int, i: int) -> None:
        leaves = [self.inputs[i]] if stage == 0 else [_leaf(array) for array in self.ready.pop(("F", stage, i))]
        if stage == 0 and is_floating(self.inputs[i].dtype):
            leaves = [Tensor(self.inputs[i])]
        keeps = self.plan.updates != "none"
        with nullcontext() if keeps and (stage, i) not in self.recomputed else no_grad():
            outputs = self._run(stage, i, leaves)
        if keeps:
            self.alive[stage, i] = leaves, None if (stage, i) in self.recomputed else outputs
        if stage + 1 == self.plan.stages:
            self.losses[i] = outputs[0].item() if outputs[0].size == 1 else 0.0
        else:
            self._hand_over("F", stage, stage + 1, i, [output.data for output in outputs])

    def _run(self, stage: int, i: int, leaves: list[Any]) -> list[Tensor]:
        result = self.stages[stage].module(*leaves)
        if stage + 1 == self.plan.stages and self.loss is not None:
            assert self.targets is not None
            result = self.loss(result, self.targets[i])
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def _backward(self, stage: int, i: int, weights: str) -> None:
        leaves, outputs = self.alive.pop((stage, i))
        last = stage + 1 == self.plan.stages
        gradients = [None] * len(outputs) if last else self.ready.pop(("B", stage, i))
        if not last:
            floats = [output for output in outputs if is_floating(output.dtype)]
            outputs = floats
        pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad]
        work = _backward_from(pairs, weights)
        if weights == "deferred":
            self.deferred[stage, i] = work
        if stage:
            self._hand_over("B", stage, stage - 1, i, [_gradient(leaf) for leaf in leaves if is_floating(leaf.dtype)])

    def _hand_over(self, direction: str, stage: int, target: int, i: int, arrays: list[Any]) -> None:
        """To the neighbour on this rank, or into the tray from which SEND takes it."""
        whole = [np.ascontiguousarray(array) for array in arrays]
        local = self.home[target, i] == self.comm.rank
        self.ready[(direction, target, i) if local else (f"SEND_{direction}", stage, i)] = whole

    # --- messages ---

    def _post(self, action: Action) -> None:
        kind, stage, i = action
        border = self._entering[stage if kind == "RECV_F" else stage + 1, i]
        if kind == "RECV_B":
            border = [(shape, dtype) for shape, dtype in border if is_floating(named_dtype(dtype))]
        source = self.home[stage + (1 if kind == "RECV_B" else -1), i]
        requests = []
        with purpose("pipeline_activation" if kind == "RECV_F" else "pipeline_gradient"):
            for k, (shape, dtype) in enumerate(border):
                fresh = track(np.empty(shape, dtype), "communication")
                requests.append(self.comm.irecv(fresh, source, self._tags[kind[-1], stage, i] + k))
        self.posted[action] = requests

    def _receive(self, action: Action) -> None:
        """Wait for the posted receive that an F, I or B needs."""
        direction = "F" if action.kind == "F" else "B" if action.kind in ("I", "B") else ""
        requests = self.posted.pop((f"RECV_{direction}", action.stage, action.microbatch), None)
        if requests is not None:
            self.ready[direction, action.stage, action.microbatch] = [self.comm.wait(request) for request in requests]
        if direction == "B":  # the gradient has come back, so the activation has arrived: its array need not wait for the step's end
            self.comm.waitall(self.sends.pop(Action("SEND_F", action.stage, action.microbatch), []))

    def _send(self, action: Action) -> None:
        kind, stage, i = action
        target = stage + (1 if kind == "SEND_F" else -1)
        with purpose("pipeline_activation" if kind == "SEND_F" else "pipeline_gradient"):
            self.sends[action] = [
                self.comm.isend(array, self.home[target, i], self._tags[kind[-1], target, i] + k)
                for k, array in enumerate(self.ready.pop(action))
            ]

    def _reduce(self, numbers: list[int]) -> None:
        """Start the sum over the data axis of complete stages: all buckets, in order."""
        for number in numbers:
            for parameter in reversed(self.stages[number].flat.parameters):
                if parameter.requires_grad:
                    parameter.zero_fill() if parameter.grad is None else None
                    self.reducers[number].ready(parameter)

    def _advance(self, action: Action, name: str) -> None:
        if self.times is not None:
            kind, stage, _ = action
            f, x, w = self.times.F[stage], self.times.I[stage], self.times.W[stage]
            seconds = {"F": f, "RECOMPUTE": f, "I": x, "W": w, "B": x + w}[kind]
            self.comm.compute(seconds=seconds, name=str(action))
            return
        counted = current_meter.get()
        if counted is not None:
            self.comm.compute(counted.take(), name=str(action))

    # --- before it starts ---

    def _dry_run(self, stage: int, arrays: list[Any]) -> list[Any]:
        module = self.stages[stage].module
        leaves = arrays if stage == 0 and not is_floating(arrays[0].dtype) else [Tensor(array) for array in arrays]
        with no_grad(), batch_coordinates():
            result = module(*leaves)
        counted = current_meter.get()
        if counted is not None:
            counted.take()
        return [output.data for output in (result if isinstance(result, (tuple, list)) else [result])]

    def _check(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        m = self.plan.microbatches
        if len(inputs) != m:
            raise UsageError(f"rank {self.comm.rank}: plan {self.plan.name!r} is for {m} micro-batches and got {len(inputs)}; give {m}")
        if self.loss is None and self.plan.updates != "none":
            raise UsageError(f"plan {self.plan.name!r} runs backward and needs a loss; pass loss=")
        if self.loss is not None and (targets is None or len(targets) != m):
            raise UsageError(f"rank {self.comm.rank}: {m} micro-batches need {m} targets, got {0 if targets is None else len(targets)}")

    def _number_messages(self) -> dict[tuple[str, int, int], int]:
        """A tag for each message between two ranks, so that what is posted in one order and sent in another still meets."""
        tags: dict[tuple[str, int, int], int] = {}
        counts: dict[tuple[int, int], int] = {}
        for (stage, i), rank in sorted(self.home.items()):
            for direction, source in (("F", stage - 1), ("B", stage + 1)):
                if 0 <= source < self.plan.stages and self.home[source, i] != rank:
                    pair = self.home[source, i], rank
                    tags[direction, stage, i] = counts.get(pair, 0)
                    counts[pair] = counts.get(pair, 0) + 8  # a border has at most eight tensors
        if max(counts.values(), default=0) > LARGEST_TAG:
            raise UsageError(f"plan {self.plan.name!r} sends {max(counts.values()) // 8} messages between two ranks, at most 2,048 fit; take fewer micro-batches")
        return tags

    def _same_plan(self) -> None:
        mine = np.frombuffer(hashlib.blake2b(self.plan.to_csv().encode(), digest_size=16).digest(), np.uint8).copy()
        with purpose("startup"):
            theirs: Any = broadcast(self.comm, mine.copy())
        if not np.array_equal(mine, theirs):
            raise MismatchError(f"rank {self.comm.rank}: its plan differs from rank 0's; build the same plan on every rank")


class _Together(Function):
    """Several outputs of one stage as one root, so that their backward is one walk."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *outputs: Any) -> Any:
        ctx.gradients = gradients
        return np.zeros((), outputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(ctx.gradients)


def _backward_from(pairs: list[tuple[Tensor, Any]], weights: str) -> Any:
    if not pairs:
        return None  # nothing in the stage is trained and nothing before it either
    if len(pairs) == 1:
        output, gradient = pairs[0]
        return output.backward(gradient, weight_gradients=weights)
    together = _Together.apply([gradient for _, gradient in pairs], *[output for output, _ in pairs])
    return together.backward(weight_gradients=weights)


def _leaf(array: Any) -> Tensor:
    return Tensor(array, requires_grad=is_floating(array.dtype))


def _gradient(leaf: Tensor) -> Any:
    return np.zeros(leaf.shape, leaf.dtype) if leaf.grad is None else leaf.grad


