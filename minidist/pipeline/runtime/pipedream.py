"""PipeDream: weights change while micro-batches are on their way, so each keeps the version that it began with.

    stage 0, p = 3    F0 F1 F2 B0 | F3 B1 | F4 B2 | ...       | an update
    version            0  0  0  0 |  1  0 |  2  0 | ...       F3 sees version 1; B1 still needs version 0

An update is out of place: a new array, so an older one lives for as long as a micro-batch needs it. Which version is
used:

    stash           F: the latest, max(0, t-(p-1-s)) on stage s; B: the same array (weight stashing)
    no-stash        F: the latest; B: the latest by then, which is the gradient of no function (to see what goes wrong)
    vertical-sync   max(0, t-(p-1)) on every stage: the version that stage 0 had when t entered
    2bw             max(t//m - 1, 0) on every stage, one update per batch of m micro-batches

A stage on k ranks (replicas) takes mini-batches round robin: rank j of them t = j, j + k, ... Each round of k is one
update, by the mean of the round's gradients, so on that stage F and B of t use version max(0, t//k - w), w being the
replica's warm-up. Parameters that several stages share have one delay, that of the first of these stages (versions.py);
where these have replicas, their round is the least common multiple K of the stages' rounds, and the version is
max(0, t//K - ceil(k w / K)), with k and w of the first of them.

Sources: Harlap et al., arXiv:1806.03377; Narayanan et al., PipeDream, SOSP 2019; PipeDream-2BW, ICML 2021. The papers
leave shared parameters out; one delay for all copies is ours.

Proved by: tests/pipeline/test_pipedream.py
"""

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, cast

from minidist.base.traces import SpanEvent
from minidist.comm.communicator import CheckedComm
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.reduction import Place, SharedGradients
from minidist.core.pipeline.runtime.stages import PipelineStage
from minidist.optim import scale_gradients_
from minidist.parallel.unused import FillingReducer
from minidist.pipeline.runtime.versions import SharedUnitVersions, UnitVersions, VersionRule


def separate(stage: PipelineStage, names: Sequence[str]) -> FlatParameters | None:
    """Make a stage's parameters of these names a separate flat unit, behind the rest; None when it has none."""
    separated = [p for p in stage.parameters if p.requires_grad and p.name in names]
    if not separated:
        return None
    own = [p for p in stage.parameters if p not in separated]
    for parameter in stage.parameters:
        parameter.flat = None  # of the unit that the two replace
    stage.flats = [FlatParameters(own), FlatParameters(separated)]
    return stage.flats[1]


class WeightVersions:
    """The weight versions of a `VersionedPipeline`: which weights an action uses, and when they change.

        versions = WeightVersions(comm, plan, stages, lambda flat: Adam(flat))
        VersionedPipeline(comm, plan, stages, loss, versions=versions).step(inputs, targets)    # a stream, with updates

    make_optimizer(flat): the optimizer of a stage's parameters, and one more of its shared ones (which become another
    flat unit); the state is that of the latest version. units: by stage, its own and its shared unit; own: the
    first of these. Memory is bounded by the versions in use: there are at most as many as stages.
    keep_gradients: each unit's `gradient` is a copy of that of its latest update. With keep_history=True, which keeps
    everything: history: the flat weights after each update, version 0 first, of every
    stage with parameters; used: (kind, stage, micro-batch) -> version, also in the trace as spans of category
    "version".

    Sends, of a replicated stage's gradients, an all-reduce per round (gradient_reduce); of shared parameters, per
    update, one array from every rank that has them to the first of these and one back (tied). Raises UsageError for a
    plan with a flush.
    """

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        make_optimizer: Callable[[FlatParameters], Any],
        *,
        tied: Sequence[str] = (),
        reduction: str = "ordered",
        keep_history: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        if plan.updates in ("flush", "none"):
            raise UsageError(
                f"plan {plan.name!r} updates the weights once, at its end; run it with Pipeline alone, without"
                " versions=WeightVersions(...)"
            )
        holders = plan.holders()
        self.replicas = {stage: len(ranks) for stage, ranks in holders.items() if len(ranks) > 1}
        self.comm, self.plan = comm, plan
        self.newest = plan.updates == "no-stash"  # backward sees the latest weights: a wrong gradient

        # A unit per stage, and one of the parameters that it shares: these have one delay on all their stages.
        separated = {stage.number: flat for stage in stages if (flat := separate(stage, tied)) is not None}
        self.shared = SharedGradients(comm.dup(), {stage.number: stage.parameters for stage in stages}, tied)
        groups = comm.dup()
        self.units: dict[int, list[UnitVersions]] = {}
        for stage in stages:
            n, flat = stage.number, stage.flats[0]
            self.units[n] = []
            if len(flat):
                arguments = flat, make_optimizer(flat), self._rule(n), keep_history, keep_gradients
                self.units[n].append(UnitVersions(*arguments))
        for n, flat in separated.items():
            places = self._places_of(n, flat)
            rounds = self._round_of_shared(places)
            rule = self._rule_of_shared(min(places)[0], rounds)
            arguments = flat, make_optimizer(flat), rule, keep_history, keep_gradients
            self.units[n].append(SharedUnitVersions(groups, places, (n, comm.rank), rounds, *arguments))
        self.own = {n: units[0] for n, units in self.units.items() if len(units) > (n in separated)}
        self.history = {n: unit.history for n, unit in self.own.items()}
        self.keep_history = keep_history
        self.used: dict[tuple[str, int, int], int] = {}

        # Which micro-batches of a stage are this rank's: replica number `turn` of them takes every k-th.
        self._turn = {stage.number: holders[stage.number].index(comm.rank) for stage in stages}
        self._check_turns()
        self._ended: tuple[int, int] | None = None  # (stage, micro-batch) whose gradient is whole and not used yet
        self._begun = dict.fromkeys(self.units, 0)  # forwards so far
        self._count = plan.microbatches  # of the stream
        self.rounds = self._reducers(stages[0].number, reduction) if self.replicas else {}

    def _reducers(self, stage: int, algorithm: str) -> dict[int, GradientReducer]:
        """Return what sums a round's gradients over the replicas of this rank's only stage."""
        group = cast(CheckedComm, self.comm).split(stage, self.comm.rank)
        return {
            n: FillingReducer(unit.flat, group, algorithm=algorithm)
            for n, unit in self.own.items()
            if n in self.replicas
        }

    def _rule(self, stage: int) -> VersionRule | None:
        """Return the version by micro-batch of a stage's own unit; None where the order of actions makes it."""
        plan = self.plan
        if plan.updates == "2bw":
            return lambda i: max(i // plan.batch - 1, 0)
        if plan.updates == "vertical-sync":
            return lambda i: max(0, i - (plan.stages - 1))
        return None

    def _rule_of_shared(self, first: int, rounds: int) -> VersionRule:
        """Return the version by micro-batch of a unit that several stages share; first: the first of them."""
        if (rule := self._rule(first)) is not None:
            return rule
        # When stage `first` begins micro-batch i, all before i - k w have passed, and the rounds that they end.
        k, ranks = self.replicas.get(first, 1), sum(self.replicas.get(n, 1) for n in range(first, self.plan.stages))
        delay = -(-(k * ((ranks - 1) // k)) // rounds)
        return lambda i: max(0, i // rounds - delay)

    def rounds_of_plan(self) -> set[int]:
        """Return how many micro-batches an update takes, of the units of all stages."""
        rounds = {self.replicas.get(stage, self.plan.batch) for stage in range(self.plan.stages)}
        tied = [group.places for group in self.shared.groups if group.tied]
        return rounds | {self._round_of_shared(places) for places in tied}

    def _round_of_shared(self, places: Sequence[Place]) -> int:
        if self.plan.updates == "2bw":
            return self.plan.batch
        return lcm(*(self.replicas.get(stage, 1) for stage, _ in places))

    def _places_of(self, number: int, flat: FlatParameters) -> list[Place]:
        """Return (stage, rank) of the shared parameters of a stage; UsageError unless all have the same places."""
        groups = [group for group in self.shared.groups if set(group.names) & set(flat.names)]
        places = sorted({place for group in groups for place in group.places})
        if any(sorted(group.places) != places for group in groups) or len({rank for _, rank in places}) != len(places):
            raise UsageError(
                f"the tied parameters {flat.names} of stage {number} are not all on the same stages; pass in tied= only"
                " those that are"
            )
        return places

    def _check_turns(self) -> None:
        """Raise UsageError unless the ranks of a stage take micro-batches in turn, on which rounds depend."""
        for (stage, i), rank in self.plan.rank_of_stage().items():
            if stage in self._turn and (rank == self.comm.rank) != (
                i % self.replicas.get(stage, 1) == self._turn[stage]
            ):
                raise UsageError(
                    f"plan {self.plan.name!r} gives micro-batch {i} of stage {stage} to rank {rank}; its"
                    f" {self.replicas.get(stage, 1)} ranks must take them in turn"
                )

    # --- what the pipeline calls ---

    def begin(self, count: int) -> None:
        """Begin a stream of `count` micro-batches: the latest weights are its version 0."""
        self._begun, self._count, self._ended = dict.fromkeys(self.units, 0), count, None
        for units in self.units.values():
            for unit in units:
                unit.begin()

    def before_forward(self, stage: int, i: int) -> None:
        """Bind the weights that micro-batch i's forward sees."""
        self._begun[stage] += 1
        self._note("F", stage, i, [unit.forward(i) for unit in self.units[stage]])

    def before_recompute(self, stage: int, i: int) -> None:
        """Bind the weights that its forward saw."""
        for unit in self.units[stage]:
            unit.recompute(i)

    def before_backward(self, stage: int, i: int) -> None:
        """Bind the weights that its backward sees."""
        self._note("B", stage, i, [unit.backward(i, self.newest) for unit in self.units[stage]])

    def after_backward(self, stage: int, i: int) -> None:
        """Note that its gradient is whole."""
        self._ended = stage, i

    def update(self) -> None:
        """Use the gradient of the last backward, when that was passed on and before anything else can make a rank wait.

        Replicas wait for each other here.
        """
        if self._ended is None:
            return
        (stage, i), self._ended = self._ended, None
        # The rounds that end with it are those in which this rank has no further micro-batch.
        following = i + self.replicas.get(stage, 1)
        for unit in self.units[stage]:
            size = self.round_of(stage, unit)
            if following // size > i // size or following >= self._count:
                self._end_round(stage, unit, i // size)

    def end_step(self, last: int) -> None:
        """Make the updates of all rounds that end with micro-batch `last` of the stream, on every rank at this moment.

        Instead of `update`, where ranks have common steps: whoever looks at the weights of a step then sees the same
        number of updates on all ranks of a stage.
        """
        self._ended = None
        for stage, units in self.units.items():
            for unit in units:
                size = self.round_of(stage, unit)
                if (last + 1) % size == 0 or last + 1 == self._count:
                    self._end_round(stage, unit, last // size)

    def finish(self) -> None:
        """End the stream: the last rounds without a micro-batch of this rank, and the latest weights everywhere.

        After `end_step` of the last micro-batch, `settle` is all that is left.
        """
        for stage, units in self.units.items():
            for unit in units:
                size = self.round_of(stage, unit)
                last = -(-self._count // size) - 1
                if not any(
                    i % self.replicas.get(stage, 1) == self._turn[stage] for i in range(last * size, self._count)
                ):
                    self._end_round(stage, unit, last)
        self.settle()

    def settle(self) -> None:
        """Take the updates that are still on their way, and compute with the latest weights from now on."""
        for stage, units in self.units.items():
            for unit in units:
                unit.settle(-(-self._count // self.round_of(stage, unit)))

    def round_of(self, stage: int, unit: UnitVersions) -> int:
        """Return how many micro-batches make an update of a unit."""
        if isinstance(unit, SharedUnitVersions):
            return unit.round
        return self.replicas.get(stage, self.plan.batch)

    def _end_round(self, stage: int, unit: UnitVersions, number: int) -> None:
        """Make update `number` of a unit; of several mini-batches the mean of the gradients, added in rank order."""
        # The next micro-batch that enters the stage here.
        replicas = self.replicas.get(stage, 1)
        entering = self._turn[stage] + self._begun[stage] * replicas
        following = entering if entering < self._count else None
        size = self.round_of(stage, unit)
        mean = 1.0 / min(size, self._count - number * size) if size > 1 and self.plan.updates != "2bw" else 1.0

        if isinstance(unit, SharedUnitVersions):
            unit.gradient_is_whole(number, following, mean)
            return
        if replicas > 1:
            reducer = self.rounds[stage]
            for parameter in reversed(unit.flat.parameters):
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.zero_fill()
                    reducer.ready(parameter)
            reducer.finish()
            scale_gradients_(unit.flat, mean)
        unit.update(following, self.newest)

    def _note(self, kind: str, stage: int, i: int, versions: list[int]) -> None:
        """Note the version of the stage's first unit, also in the trace."""
        if not versions:
            return
        if self.keep_history:
            self.used[kind, stage, i] = versions[0]
        now = self.comm.time()
        name = f"version {versions[0]} for {stage}{kind}{i}"
        self.comm.trace.add_span(SpanEvent(self.comm.trace.rank, "main", name, now, now, "version"))
