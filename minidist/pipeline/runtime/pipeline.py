"""The runtime: executes a rank's order, action by action. It knows no schedule; the plan is all it has.

    rank 0   0RECV_B0  0F0 0SEND_F0  0F1 0SEND_F1   0B0 ...
                          │             ▲
                          ▼             │ waits for the posted receive
    rank 1   1RECV_F0     1F0        1B0 1SEND_B0 ...

RECV posts a receive into a fresh buffer: the stage's first layer keeps its input for backward, so a buffer that is used
again would change a gradient. SEND starts; it is waited for when the plan says that it must have arrived, so that
1F1B's memory is what the plan says (messages.py). Neighbours on one rank pass their arrays by reference. Every plan is
validated before anything runs, so a wrong one raises an error and does not hang.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from minidist.autograd import MeanOfRows, Tensor, current_flop_counter, no_grad
from minidist.base import arrays as xp
from minidist.base.errors import MismatchError, UsageError
from minidist.base.fingerprint import fingerprint
from minidist.base.random import batch_coordinates
from minidist.base.trace import purpose
from minidist.collectives import all_reduce, broadcast
from minidist.comm import Comm, check_communicator
from minidist.optim import block_square_sums, check_max_norm, clip_by_norm_, norm_from_blocks
from minidist.parallel import GradientReducer, Shard
from minidist.parallel.running_statistics import Exchange, RunningStatistics, batch_norms
from minidist.pipeline.lowering import lower
from minidist.pipeline.passes import forwards
from minidist.pipeline.plan import Action, Plan, actions_of
from minidist.pipeline.runtime.layer_profile import LayerProfile
from minidist.pipeline.runtime.messages import Message, Messages, Orders
from minidist.pipeline.runtime.norm import gather_blocks
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.shapes import Key, MicroBatches, StageMetadata, exchange_shapes
from minidist.pipeline.runtime.shared import SharedGradients
from minidist.pipeline.runtime.shared_shards import SharedShards
from minidist.pipeline.runtime.stages import PipelineStage, backward_from, has_gradient, outputs_by_target
from minidist.pipeline.times import Times
from minidist.pipeline.validate import validate

Loss = Callable[[Any, Any], Tensor]  # (output of the last stage, target of the micro-batch) -> its part of the loss


SENDS = {"SEND_F": 1, "SEND_B": -1}  # the stage that a transfer goes to, relative to its own


class Step(NamedTuple):
    """An action of this rank's order, taken apart once."""

    kind: str
    stage: int
    microbatch: int
    name: str


Item = tuple[Sequence[Step], Sequence[Message]]  # actions, and the gradients that have arrived when they are done


@lru_cache(maxsize=4)
def _prepared(plan: Plan, prefetch: int, may_be_wrong: bool) -> tuple[Plan, Orders, Mapping[Key, int]]:
    """Return a valid plan with its transfers, its actions, and the rank of each (stage, micro-batch).

    All ranks of a simulated world have the same plan, and the work grows with all of its actions, so it is kept. The
    orders are tuples here. may_be_wrong: PipeDream can show what goes wrong with the weights.
    """
    validate(plan, allow_wrong_gradients=may_be_wrong)
    lowered = plan if plan.is_lowered else lower(plan, prefetch)
    orders = [[actions_of(item) for item in order] for order in lowered.orders]
    return lowered, orders, MappingProxyType(lowered.rank_of_stage())


def _steps(order: Sequence[Sequence[Action]]) -> list[list[Step]]:
    """Return a rank's order with its actions taken apart."""
    return [[Step(a.kind, a.stage, a.microbatch, str(a)) for a in item] for item in order]


def _check_flushes(plan: Plan, versions: WeightVersions | None, data: Comm | None) -> None:
    """Raise UsageError for a sum over the data axis with weights that change on the way."""
    if versions is not None and data is not None:
        raise UsageError(
            f"plan {plan.name!r} updates its weights on the way, so data= has no moment to sum gradients over it;"
            " give its stages several ranks in the plan instead, or take a schedule that flushes, such as 1f1b"
        )


def _check_fits(plan: Plan, comm: Comm, stages: Collection[int], versions: WeightVersions | None) -> None:
    """Raise UsageError unless the plan is for these ranks, and for the stages of this one."""
    if plan.updates not in ("flush", "none") and versions is None:
        raise UsageError(
            f"plan {plan.name!r} updates its weights on the way; give the pipeline versions=WeightVersions(...)"
        )
    if plan.ranks != comm.size:
        raise UsageError(
            f"plan {plan.name!r} is for {plan.ranks} ranks and there are {comm.size}; start {plan.ranks} ranks"
        )
    if sorted(stages) != plan.stages_of(comm.rank):
        raise UsageError(
            f"rank {comm.rank}: plan {plan.name!r} gives it stages {plan.stages_of(comm.rank)} and it was built"
            f" with {sorted(stages)}; build the stages of Plan.stages_of(rank)"
        )


class Pipeline:
    """One rank's part of a pipeline: `step(inputs, targets)` runs the whole plan once and leaves the gradients.

    stages: this rank's stages, exactly those that the plan gives it. loss: called on the last stage; it divides by the
    global count itself, because micro-batches' losses and gradients are summed. tied: names of parameters that several
    stages share; shared: the object that sums their gradients, when the caller has made it.
    data: communicator of the data axis; gradients are then summed over it too (`reduction`: all-reduce algorithm), and
    running statistics of batch normalisation become those of the rows of all ranks.
    reducers: those of each stage, when the caller (ZeRO) has made them, which then sum the gradients; reduce_each: they
    reduce in the backward of every micro-batch (ZeRO 2), not once at the end. shards: those of each stage, where
    gradients are sharded; the gradients of shared parameters are then added shard by shard.
    versions: which weights each forward and backward uses, and when they change (`WeightVersions`: PipeDream); by
    default the weights stay and the caller updates them after `step`.
    prefetch: number of receives posted ahead.
    coordinates: micro-batch -> context in which its passes run (`batch_coordinates`).
    times: seconds by which actions advance a virtual clock, for teaching; by default what a FlopCounter counted does.
    metadata: what crosses stage boundaries, when it is known; then nothing is sent for it, nor to compare the plans.
    period: of the paths of a stream's micro-batches, when a `Stream` runs it beyond the end of its plan.
    profile: what measures the layers while `step` runs them.

    Sends, per step and boundary between two ranks: each micro-batch's activation (purpose pipeline_activation) and its
    gradient (pipeline_gradient); shared gradients (tied, gradient_reduce); and the losses, 8 B per micro-batch
    (metrics). Raises PlanError for a wrong plan, UsageError for stages or inputs that do not fit it, MismatchError when
    ranks have different plans.
    """

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        loss: Loss | None,
        *,
        tied: Sequence[str] = (),
        shared: SharedGradients | None = None,
        data: Comm | None = None,
        reduction: str = "ring",
        reducers: Mapping[int, Sequence[GradientReducer]] | None = None,
        reduce_each: bool = False,
        shards: Mapping[int, Sequence[Shard]] | None = None,
        versions: WeightVersions | None = None,
        prefetch: int = 1,
        coordinates: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        times: Times | None = None,
        metadata: StageMetadata | None = None,
        period: int | None = None,
        profile: LayerProfile | None = None,
    ) -> None:
        check_communicator(comm, "Pipeline")
        _check_flushes(plan, versions, data)

        # [1] The plan: valid, for these ranks and for these stages.
        fixed = plan.with_orders(tuple(tuple(order) for order in plan.orders))
        lowered, orders, rank_of = _prepared(fixed, prefetch, versions is not None)
        self.stages = {stage.number: stage for stage in stages}
        _check_fits(plan, comm, self.stages, versions)
        self.comm, self.loss, self.versions, self.times, self.profile = comm, loss, versions, times, profile
        self.coordinates, self.prefetch, self.reduce_each = coordinates, prefetch, reduce_each
        self.flats = [flat for stage in self.stages.values() for flat in stage.flats]

        # [2] What each action does: computations and transfers in one order.
        self.plan = lowered
        self.order = _steps(orders[comm.rank])
        self.recomputed = {(a.stage, a.microbatch) for item in self.order for a in item if a.kind == "RECOMPUTE"}
        self.messages = Messages(comm, self.plan, orders, rank_of, period)
        self.metadata = StageMetadata()
        if metadata is None:
            self._check_same_plan()
        else:
            self._know(metadata)

        # [3] Who sums the gradients: the places (stage, rank) of a shared parameter first, then a stage's replicas.
        self.shared = self._shared_gradients(tied, shards) if shared is None else shared
        self.reducers: dict[int, list[GradientReducer]] = {n: list(given) for n, given in (reducers or {}).items()}
        if reducers is None and shards is None:
            self.reducers = self._replica_reducers(data, reduction)
        # Shared parameters are summed over their places first, at the end of the step.
        self.reduced_early = set() if reduce_each else self.reducers.keys() - self.shared.stages

        # [4] Who combines running statistics of batch norms: the ranks of a stage (two in DualPipe), then its replicas.
        self.statistics = self._running_statistics(data)

    def _shared_gradients(
        self, tied: Sequence[str], shards: Mapping[int, Sequence[Shard]] | None
    ) -> SharedGradients | SharedShards:
        """Return what sums the gradients of shared parameters over their places."""
        if self.versions is not None:
            return self.versions.shared
        parameters = {n: stage.parameters for n, stage in self.stages.items()}
        if shards is not None:
            return SharedShards(self.comm.dup(), parameters, tied, shards)
        return SharedGradients(self.comm.dup(), parameters, tied)

    def _replica_reducers(self, data: Comm | None, algorithm: str) -> dict[int, list[GradientReducer]]:
        """Return what sums the gradients of each stage over the data axis."""
        if data is None or data.size == 1:
            return {}
        return {
            n: [
                GradientReducer(flat, data.dup(), algorithm=algorithm, unused="zeros")
                for flat in stage.flats
                if len(flat)
            ]
            for n, stage in sorted(self.stages.items())
        }

    def _running_statistics(self, data: Comm | None) -> list[RunningStatistics]:
        """Return those of this rank's stages; UsageError where the ranks of a stage update at different times."""
        found = [
            RunningStatistics(self.stages[n].module, self._exchange(ranks), data)
            for n, ranks in self.plan.holders().items()
            if n in self.stages
        ]
        found = [statistics for statistics in found if statistics.layers]
        if found and self.versions is not None:
            raise UsageError(
                f"plan {self.plan.name!r} updates a stage with batch normalisation on several ranks at different times,"
                " and its running statistics are those of all rows of one step; take a schedule that flushes, such as"
                " 1f1b"
            )
        return found

    def _exchange(self, ranks: Sequence[int]) -> Exchange | None:
        """Return how the ranks that compute one stage gather their words: each sends its own to all others."""
        if len(ranks) == 1:
            return None

        def exchange(words: np.ndarray) -> np.ndarray:
            comm, table = self.shared.comm, xp.stack([words] * len(ranks))
            others = [(at, rank) for at, rank in enumerate(ranks) if rank != comm.rank]
            requests = [comm.irecv(table[at], rank) for at, rank in others]
            requests += [comm.isend(words, rank) for _, rank in others]
            comm.waitall(requests)
            return table

        return exchange

    def forwards(self, loss: Loss, count: int | None = None) -> "Pipeline":
        """Return the same stages on the same ranks, forward only: its `step` returns losses and leaves gradients alone.

        count: of the plan's first micro-batches only. Every rank calls it, after a step: it knows the shapes that this
        one has learned, and sends nothing for them.
        """
        return Pipeline(
            self.comm,
            forwards(self.plan, count),
            list(self.stages.values()),
            loss,
            shared=self.shared,
            prefetch=self.prefetch,
            coordinates=self.coordinates,
            times=self.times,
            metadata=self.metadata if count is None else self.metadata.of_first(count),
        )

    # --- a step ---

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the plan on micro-batches `inputs`; returns every micro-batch's loss, on every rank.

        Every rank passes the micro-batches (arrays, whose first dims may differ, or `MicroBatches`), the first stage
        reads the inputs, the last the targets. Gradients are added to what the parameters have; call `zero_grad`
        before. With `versions` the plan updates the weights on the way, and leaves the latest version.
        """
        # [1] Shapes of what will arrive, on the first step and whenever the inputs' shapes change.
        self.begin(inputs, targets)
        # [2] Warm-up, steady state and cool-down: the plan's order.
        self.execute(self.items)
        # [3] The gradients' sums over places and replicas.
        self.sum_gradients()
        # [4] The last stage's losses, on every rank.
        with purpose("metrics"):
            losses = all_reduce(self.comm, self.losses, algorithm="ordered")
        return np.asarray(losses).tolist()  # type: ignore[no-any-return]

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        """Begin a step on these micro-batches: nothing is alive, nothing on its way."""
        m, rank = self.plan.microbatches, self.comm.rank
        if len(inputs) != m:
            raise UsageError(
                f"rank {rank}: plan {self.plan.name!r} is for {m} micro-batches and got {len(inputs)}; give {m}"
            )
        if self.loss is None and self.plan.updates != "none":
            raise UsageError(f"plan {self.plan.name!r} runs backward and needs a loss; pass loss=")
        if self.loss is not None and (targets is None or len(targets) != m):
            got = 0 if targets is None else len(targets)
            raise UsageError(f"rank {rank}: {m} micro-batches need {m} targets, got {got}")
        described = inputs.described if isinstance(inputs, MicroBatches) else inputs
        if self.metadata.inputs != list(map(attrgetter("shape", "dtype"), described)):
            rank_of = self.messages.rank_of
            self._know(exchange_shapes(self.comm, rank_of, self.plan.stages, described, self._dry_run))
        # Zeros of micro-batches whose last stage is elsewhere; a stream's have the places of those that are long ago.
        self.inputs, self.targets, self.losses = inputs, targets, np.zeros(m)
        self.messages.begin()
        # Stages may differ (one of them may be frozen), the replicas of a stage may not.
        for n, reducers in self.reducers.items():
            for reducer in reducers:
                reducer.note_mode(self.stages[n].module)
        self.alive: dict[Key, tuple[list[Any], Any]] = {}  # leaves, and outputs by the stage that they go to
        self.deferred: dict[Key, Any] = {}  # weight gradients that wait for their W
        if self.versions is not None:
            self.versions.begin(m)

    def _know(self, metadata: StageMetadata) -> None:
        """Note what crosses stage boundaries, from which follows what has arrived behind each item of the order."""
        self.metadata = metadata
        self.messages.set_shapes(metadata)
        released = self.messages.released
        self.items: list[Item] = [(item, released.get(at, [])) for at, item in enumerate(self.order)]

    def execute(self, items: Iterable[Item]) -> None:
        """Execute items one after the other: each an action, or a pair of actions that overlap."""
        messages, versions, profile = self.messages, self.versions, self.profile
        for item, arrived in items:
            # An overlapped pair starts when both of its actions have what they need.
            if len(item) == 2:
                for kind, stage, i, _ in item:
                    messages.wait("F" if kind == "F" else "B", stage, i)

            for kind, stage, i, name in item:
                # Transfers: a receive into a fresh buffer is posted, a send is started.
                if kind in ("RECV_F", "RECV_B"):
                    messages.post(kind[-1], stage, i)
                    continue
                if kind in SENDS:
                    messages.send(kind[-1], stage, stage + SENDS[kind], i)
                    continue
                # Reduction: the stage's gradients are complete, so the sum over the replicas starts behind the compute.
                if kind == "REDUCE_GRAD":
                    if stage in self.reduced_early:
                        self._start_reduction(stage)
                    continue

                # The update of the last backward, before anything that may wait: other replicas wait for it.
                if versions is not None:
                    versions.update()
                if profile is not None:
                    profile.begin(name)
                self._compute_action(kind, stage, i)

                # The virtual clock advances by what was counted, or by what the caller says that an action takes.
                if self.times is None:
                    self.comm.advance_clock(name)
                else:
                    self.comm.compute(seconds=self._seconds(kind, stage), name=name)
                if profile is not None:
                    profile.end(stage, kind)
            messages.release(arrived)

    def _compute_action(self, kind: str, stage: int, i: int) -> None:
        """Compute an action: take what it needs, bind the weights of its version, run the stage's module."""
        versions = self.versions
        # Forward: the output is enqueued, and what is kept for backward is kept in `alive` alone.
        if kind == "F":
            arrays = [self.inputs[i]] if stage == 0 else self.messages.take("F", stage, i)
            if versions is not None:
                versions.before_forward(stage, i)
            with self.coordinates(i):
                self._forward(stage, i, arrays)
        # Backward, of inputs and weights (B) or of inputs alone (I): as the forward, with gradients.
        elif kind in ("B", "I"):
            arrays = self.messages.take("B", stage, i)
            if versions is not None:
                versions.before_backward(stage, i)
            with self.coordinates(i):
                self._backward(stage, i, arrays, "now" if kind == "B" else "deferred")
            del arrays
            if versions is not None:
                versions.after_backward(stage, i)
        # Weight backward: the weight gradients that I left.
        elif kind == "W":
            if (work := self.deferred.pop((stage, i))) is not None:
                with self.coordinates(i):
                    work.run()
            if self.reduce_each:  # a reducer finishes by itself at the end of a pass, but that pass (I) is over
                self._finish_reduction(stage)
        # Recomputation: the second forward from the kept input, this time recorded.
        else:
            if versions is not None:
                versions.before_recompute(stage, i)
            with self.coordinates(i):
                self.alive[stage, i] = self._recompute(stage, i)

    def sum_gradients(self) -> None:
        """Sum what is complete at the end: shared parameters over their places, then everything over the replicas."""
        if self.versions is not None:  # every update has summed its own
            self.versions.update()
            self.messages.finish()
            self.versions.finish()
            return
        self.messages.finish()
        if self.plan.updates == "none":
            return
        if self.shared.groups:
            self.shared.add()
        if not self.reduce_each:
            for stage in self.reducers:
                if stage in self.shared.stages:
                    self._start_reduction(stage)
            for stage in self.reducers:
                self._finish_reduction(stage)
        if self.shared.groups:
            self.shared.mark_added()
        for statistics in self.statistics:
            statistics.combine()

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's stages."""
        for flat in self.flats:
            flat.zero_grad()

    def discard_forwards(self, ends: Sequence[int]) -> None:
        """Undo the first `ends[rank]` items of every rank, all of them forwards, so that they can be executed again."""
        self.messages.discard_forwards(ends)
        self.alive.clear()

    # --- the norm over all stages ---

    def places(self) -> list[tuple[int, int]]:
        """Return (stage, rank) in the order in which the norm adds them."""
        return [(stage, rank) for stage, ranks in self.plan.holders().items() for rank in ranks]

    def block_sums(self) -> dict[int, Any]:
        """Return the block sums of squares of this rank's stages; what is shared counts at its first place only."""
        sums: dict[int, Any] = {}
        for n, stage in self.stages.items():
            gradients = [
                xp.zeros(p.size, np.float64, p.data) if p.grad is None else p.grad.reshape(-1)
                for p in stage.parameters
                if p.requires_grad and (n, self.comm.rank, p.name) not in self.shared.copies
            ]
            sums[n] = block_square_sums(xp.concatenate(gradients) if gradients else xp.zeros(0, np.float64))
        return sums

    def clip_grad_norm_(self, max_norm: float, optimizer: Any = None) -> float:
        """Clip by the norm over all stages and return it; a shared parameter counts once.

        The norm is that of one slice per stage in stage order, its first place holding what is shared: bitwise the same
        on every rank. Each rank sends its block sums (purpose clip_norm). optimizer: as for `optim.clip_by_norm_`.
        """
        check_max_norm(max_norm)
        sums = self.block_sums()
        own = [sums[stage] if rank == self.comm.rank else xp.zeros(0, np.float64) for stage, rank in self.places()]
        return clip_by_norm_(self.flats, norm_from_blocks(gather_blocks(self.comm, own)), max_norm, optimizer)

    # --- one action ---

    def _forward(self, stage: int, i: int, arrays: list[Any]) -> None:
        """Run a stage's forward of micro-batch i on what arrived, and enqueue its outputs or note its loss."""
        # The graph begins at what arrived: float inputs of a later stage get a gradient, tokens do not.
        keeps, recomputes = self.plan.updates != "none", (stage, i % self.messages.period) in self.recomputed
        leaves: list[Any] = []
        for array in arrays:
            floats = has_gradient(array.dtype)
            leaves.append(Tensor(array, requires_grad=floats and stage > 0) if floats or stage > 0 else array)
        with nullcontext() if keeps and not recomputes else no_grad():
            outputs = self._compute(stage, i, leaves)
        if keeps:
            self.alive[stage, i] = leaves, None if recomputes else outputs

        # The last stage ends in the loss; every other one enqueues its outputs for the stages that need them.
        if stage + 1 == self.plan.stages:
            output = outputs[stage + 1][0].data
            self.losses[i % len(self.losses)] = output.item() if output.size == 1 else 0.0
            return
        for target, tensors in outputs.items():
            arrays = []
            for tensor in tensors:
                arrays.append(tensor.data)
            self.messages.enqueue("F", stage, target, i, arrays)

    def _recompute(self, stage: int, i: int) -> tuple[list[Any], dict[int, list[Tensor]]]:
        """Run the forward of (stage, i) again from its kept leaves; nothing of the first run outlives the call."""
        leaves, _ = self.alive[stage, i]
        return leaves, self._compute(stage, i, leaves)

    def _compute(self, stage: int, i: int, leaves: list[Any]) -> dict[int, list[Tensor]]:
        """Return the outputs of a stage by the stage that they go to; of the last stage, the loss."""
        result = self.stages[stage].module(*leaves)
        if stage + 1 == self.plan.stages and self.loss is not None:
            assert self.targets is not None
            result = self.loss(result, self.targets[i])
            # The sum over micro-batches is the loss of the batch, so a mean over this one's rows is too large.
            added = self.plan.microbatches if self.versions is None else self.plan.batch
            if added > 1 and isinstance(getattr(getattr(result, "node", None), "name", ""), MeanOfRows):
                raise UsageError(
                    f"the loss of micro-batch {i} is the mean over its own rows, and a pipeline adds the losses of"
                    f" {added} micro-batches; divide by the rows (tokens) of the whole batch:"
                    " lambda output, target: cross_entropy(output, target, divisor)"
                )
        return outputs_by_target(result, stage)

    def _backward(self, stage: int, i: int, arrays: list[Any], weights: str) -> None:
        """Run a stage's backward of micro-batch i with the gradients that arrived, and enqueue those of its inputs."""
        # Roots: the loss, or the float outputs in the order in which their gradients arrived.
        slot = i % self.messages.period
        leaves, outputs = self.alive.pop((stage, i))
        if stage + 1 == self.plan.stages:
            roots, gradients = outputs[stage + 1], [None] * len(outputs[stage + 1])
        else:
            roots, gradients = [], arrays
            for target in self.metadata.targets[stage, slot]:
                for output in outputs[target]:
                    if has_gradient(output.dtype):
                        roots.append(output)
        work = backward_from(roots, gradients, weights)
        if weights == "deferred":
            self.deferred[stage, i] = work

        # The gradients of the leaves go back to the stages that these came from; zeros where the stage used none.
        at = 0
        for source in self.metadata.sources[stage, slot] if stage else []:
            count, arrays = len(self.metadata.tensors[source, stage, slot]), []
            for leaf in leaves[at : at + count]:
                if has_gradient(leaf.dtype):
                    arrays.append(xp.zeros(leaf.shape, leaf.dtype, leaf.data) if leaf.grad is None else leaf.grad)
            self.messages.enqueue("B", stage, source, i, arrays)
            at += count

    def _start_reduction(self, stage: int) -> None:
        """Start the sum over the data axis of a complete stage: all buckets, in order."""
        for reducer in self.reducers[stage]:
            for parameter in reversed(reducer.flat.parameters):
                if parameter.requires_grad and (parameter.grad is not None or reducer.unused == "error"):
                    parameter.zero_fill()  # when nothing was added to it
                    reducer.ready(parameter)

    def _finish_reduction(self, stage: int) -> None:
        for reducer in self.reducers.get(stage, []):
            reducer.finish()

    def _seconds(self, kind: str, stage: int) -> float:
        assert self.times is not None
        f, x, w = self.times.F[stage], self.times.I[stage], self.times.W[stage]
        return {"F": f, "RECOMPUTE": f, "I": x, "W": w, "B": x + w}[kind]

    # --- before it starts ---

    def _dry_run(self, stage: int, arrays: list[Any]) -> list[tuple[int, Any]]:
        """Return each output of a stage, with the stage that it goes to, from a forward that keeps nothing."""
        leaves = arrays if stage == 0 and not has_gradient(arrays[0].dtype) else [Tensor(array) for array in arrays]
        module = self.stages[stage].module
        # Norms that exchange statistics send nothing here: other replicas may have other shapes, and so other passes.
        silent = [layer for layer in batch_norms(module) if layer.group is not None and layer.training]
        with no_grad(), batch_coordinates(), self.coordinates(0), ExitStack() as stack:
            for layer in silent:
                layer.eval()
                stack.callback(layer.train)
            outputs = outputs_by_target(module(*leaves), stage)
        counted = current_flop_counter()
        if counted is not None:
            counted.take()
        return [(target, tensor.data) for target, tensors in outputs.items() for tensor in tensors]

    def _check_same_plan(self) -> None:
        mine = fingerprint(self.plan.to_csv())
        with purpose("startup"):
            first: Any = broadcast(self.comm, mine.copy())
        if not xp.array_equal(mine, first):
            raise MismatchError(
                f"rank {self.comm.rank}: its plan differs from rank 0's; build the same plan on every rank"
            )
