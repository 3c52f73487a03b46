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
replica's warm-up. Parameters that several stages share have one delay, that of the first of these stages (versions.py).

Sources: Harlap et al., arXiv:1806.03377; Narayanan et al., PipeDream, SOSP 2019; PipeDream-2BW, ICML 2021. The papers
leave shared parameters out; one delay for all copies is ours.

Proved by: tests/pipeline/test_pipedream.py
"""

from collections.abc import Callable, Sequence
from typing import Any

from minidist.base.errors import UsageError
from minidist.base.trace import SpanEvent
from minidist.comm import Comm
from minidist.nn.flat import FlatParameters
from minidist.optim import scale_gradients_
from minidist.parallel import GradientReducer
from minidist.pipeline.plan import Plan
from minidist.pipeline.runtime.shared import SharedGradients
from minidist.pipeline.runtime.stages import PipelineStage
from minidist.pipeline.runtime.versions import SharedUnitVersions, UnitVersions, VersionRule


class WeightVersions:
    """The weight-version policy of an asynchronous `Pipeline`: which weights an action uses, and when they change.

        versions = WeightVersions(comm, plan, stages, lambda flat: Adam(flat))
        Pipeline(comm, plan, stages, loss, versions=versions).step(inputs, targets)      # a whole stream, with updates

    make_optimizer(flat): the optimizer of a stage's parameters, and one more of its shared ones (which become a flat
    unit of their own); the state is that of the latest version. units: by stage, its own and its shared unit; own: the
    first of these. Memory is bounded by the versions in use, of which there are at most as many as stages. With
    keep_history=True, which keeps everything: history: the flat weights after each update, version 0 first, of every
    stage with parameters; used: (kind, stage, micro-batch) -> version, also in the trace as spans of category
    "version".

    Sends, of a replicated stage's gradients, an all-reduce per round (gradient_reduce); of shared parameters, per
    update, one array to the first stage and one back (tied). Raises UsageError for a plan with a flush, and for shared
    parameters on replicated stages.
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
    ) -> None:
        if plan.updates in ("flush", "none"):
            raise UsageError(
                f"plan {plan.name!r} updates the weights once, at its end; run it with Pipeline alone, without"
                " versions=WeightVersions(...)"
            )
        holders = plan.holders()
        self.replicas = {stage: ranks for stage, ranks in holders.items() if len(ranks) > 1}
        if tied and self.replicas:
            first = min(self.replicas)
            raise UsageError(
                f"{tied[0]!r} is on several stages, and stage {first} on {len(self.replicas[first])} ranks; untie it,"
                " or give each stage one rank"
            )
        self.comm, self.plan = comm, plan
        self.newest = plan.updates == "no-stash"  # backward sees the latest weights: a wrong gradient

        # A unit per stage, and one of the parameters that it shares: these have one delay on all their stages.
        separated = {stage.number: flat for stage in stages if (flat := stage.separate(tied)) is not None}
        self.shared = SharedGradients(comm.dup(), {stage.number: stage.parameters for stage in stages}, tied)
        groups = comm.dup()
        self.units: dict[int, list[UnitVersions]] = {}
        for stage in stages:
            n, flat = stage.number, stage.flats[0]
            own = [flat] if len(flat) else []
            rule = self._rule(n, is_shared=False)
            self.units[n] = [UnitVersions(f, make_optimizer(f), rule, plan.batch, keep_history) for f in own]
        for n, flat in separated.items():
            places = self._places_of(n, flat)
            rule = self._rule(min(places), is_shared=True)
            optimizer = make_optimizer(flat)
            self.units[n].append(SharedUnitVersions(groups, places, n, flat, optimizer, rule, plan.batch, keep_history))
        self.own = {n: units[0] for n, units in self.units.items() if len(units) > (n in separated)}
        self.history = {n: unit.history for n, unit in self.own.items()}
        self.keep_history = keep_history
        self.used: dict[tuple[str, int, int], int] = {}

        # The micro-batches of each stage on this rank, in the order in which they enter; replicas sum in rounds.
        self._numbers: dict[int, list[int]] = {stage.number: [] for stage in stages}
        for (number, i), rank in sorted(plan.rank_of_stage().items()):
            if rank == comm.rank:
                self._numbers[number].append(i)
        self._ended: tuple[int, int] | None = None  # (stage, micro-batch) whose gradient is whole and not used yet
        self._begun = dict.fromkeys(self.units, 0)  # forwards so far
        self.rounds: dict[int, GradientReducer] = {}
        if self.replicas:
            group = comm.split(stages[0].number, comm.rank)  # a rank has one stage
            for n, unit in self.own.items():
                if n in self.replicas:
                    self.rounds[n] = GradientReducer(unit.flat, group, algorithm=reduction, unused="zeros")

    def _rule(self, stage: int, is_shared: bool) -> VersionRule | None:
        """Return the version by micro-batch; None where the order of actions makes it."""
        plan = self.plan
        if plan.updates == "2bw":
            return lambda i: max(i // plan.batch - 1, 0)
        if plan.updates == "vertical-sync" or is_shared:
            delay = plan.stages - 1 - (0 if plan.updates == "vertical-sync" else stage)
            return lambda i: max(0, i - delay)
        return None

    def _places_of(self, number: int, flat: FlatParameters) -> dict[int, int]:
        """Return stage -> rank of the shared parameters of a stage; UsageError unless all have the same stages."""
        groups = [group for group in self.shared.groups if set(group.names) & set(flat.names)]
        places = {place for group in groups for place in group.places}
        if any(set(group.places) != places for group in groups) or len(dict(places)) != len(places):
            raise UsageError(
                f"the tied parameters {flat.names} of stage {number} are not all on the same stages; pass in tied= only"
                " those that are"
            )
        return dict(sorted(places))

    # --- what the pipeline calls ---

    def begin(self) -> None:
        """Begin a stream: the latest weights are its version 0."""
        self._begun = dict.fromkeys(self.units, 0)
        for units in self.units.values():
            for unit in units:
                unit.begin()

    def before_forward(self, stage: int, i: int) -> None:
        """Bind the weights that micro-batch i's forward sees."""
        self.update()
        self._begun[stage] += 1
        self._note("F", stage, i, [unit.forward(i) for unit in self.units[stage]])

    def before_backward(self, stage: int, i: int) -> None:
        """Bind the weights that its backward sees."""
        self.update()
        self._note("B", stage, i, [unit.backward(i, self.newest) for unit in self.units[stage]])

    def after_backward(self, stage: int, i: int) -> None:
        """Note that its gradient is whole."""
        self._ended = stage, i

    def update(self) -> None:
        """Use the gradient of the last backward: not before that was passed on, for other replicas wait in this."""
        if self._ended is None:
            return
        (stage, i), self._ended = self._ended, None
        if stage in self.replicas:
            self._end_round(stage, self._numbers[stage].index(i))
            return
        if (i + 1) % self.plan.batch:
            return
        begun, numbers = self._begun[stage], self._numbers[stage]
        entering = numbers[begun] if begun < len(numbers) else None
        for unit in self.units[stage]:
            if isinstance(unit, SharedUnitVersions):
                unit.gradient_is_whole((i + 1) // self.plan.batch - 1, entering)
            else:
                unit.update(entering, self.newest)

    def finish(self) -> None:
        """End the stream: the last round of replicas without a mini-batch in it, and the latest weights everywhere."""
        for stage, ranks in self.replicas.items():
            rounds = -(-self.plan.microbatches // len(ranks))
            if stage in self.units and len(self._numbers[stage]) < rounds:
                self._end_round(stage, rounds - 1)
        for units in self.units.values():
            for unit in units:
                unit.settle(self.plan.microbatches // self.plan.batch)

    def _end_round(self, stage: int, number: int) -> None:
        """Make one update of a replicated stage: the mean of the round's gradients, added in rank order."""
        replicas = len(self.replicas[stage])
        for unit in self.units[stage]:
            reducer = self.rounds[stage]
            for parameter in reversed(unit.flat.parameters):
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.zero_fill()
                    reducer.ready(parameter)
            reducer.finish()
            taking_part = min(replicas, self.plan.microbatches - number * replicas)
            scale_gradients_(unit.flat, 1.0 / taking_part)
            unit.update(None, self.newest)

    def _note(self, kind: str, stage: int, i: int, versions: list[int]) -> None:
        """Note the version of the stage's first unit, also in the trace."""
        if not versions:
            return
        if self.keep_history:
            self.used[kind, stage, i] = versions[0]
        now = self.comm.time()
        name = f"version {versions[0]} for {stage}{kind}{i}"
        self.comm.trace.add_span(SpanEvent(self.comm.trace.rank, "main", name, now, now, "version"))
