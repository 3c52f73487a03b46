"""PipeDream: weights change while micro-batches are on their way, so each keeps the version that it began with.

    stage 0, p = 3    F0 F1 F2 B0 | F3 B1 | F4 B2 | ...       | an update
    version            0  0  0  0 |  1  0 |  2  0 | ...       F3 sees version 1; B1 comes after it and still needs version 0

An update is out of place: a new array, so an older one lives for as long as a micro-batch needs it. Which version is
used:

    stash           F: the latest, max(0, t-(p-1-s)) on stage s; B: the same array (weight stashing)
    no-stash        F: the latest; B: the latest by then, which is the gradient of no function (to see what goes wrong)
    vertical-sync   max(0, t-(p-1)) on every stage: the version that stage 0 had when t entered
    2bw             max(t//m - 1, 0) on every stage, one update a batch of m micro-batches

A stage on k ranks (replicas) takes mini-batches round robin: rank j of them t = j, j + k, ... Each round of k is one
update, by the mean of the round's gradients, so on that stage F and B of t use version max(0, t//k - w), w being the
replica's warm-up. Parameters that several stages share have one delay, that of the first of these stages (versions.py).

Sources: Harlap et al., arXiv:1806.03377; Narayanan et al., PipeDream, SOSP 2019; PipeDream-2BW, ICML 2021. The papers
leave shared parameters out; one delay for all copies is ours.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from minidist.base.errors import UsageError
from minidist.base.trace import SpanEvent
from minidist.comm import Comm
from minidist.nn.flat import FlatParameters
from minidist.optim import scale_gradients_
from minidist.parallel import GradientReducer
from minidist.pipeline.plan import Plan
from minidist.pipeline.runtime.pipeline import Loss, Pipeline
from minidist.pipeline.runtime.stages import PipelineStage
from minidist.pipeline.times import Times
from minidist.pipeline.versions import Law, SharedVersions, Versions


class PipeDream(Pipeline):
    """One rank's stage of an asynchronous pipeline; `step` runs a whole stream of micro-batches, updates included.

    make_optimizer(flat): the optimizer of a stage's parameters, and one more of its shared ones; the state is that of
    the latest version. history: the flat weights after each update, version 0 first, of every stage with parameters
    (only with keep_history=True). versions_used: (kind, stage, micro-batch) -> version, also in the trace as spans of
    category "version".

    Sends what a `Pipeline` sends; of a replicated stage's gradients an all-reduce a round (gradient_reduce); of shared
    parameters, an update, one array to the first stage and one back (tied). Raises UsageError for a plan with a flush
    (use `Pipeline`), and for shared parameters on replicated stages.
    """

    UPDATES = ("stash", "no-stash", "vertical-sync", "2bw")

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        loss: Loss,
        make_optimizer: Callable[[FlatParameters], Any],
        *,
        tied: Sequence[str] = (),
        reduction: str = "ordered",
        prefetch: int = 1,
        coordinates: Callable[[int], AbstractContextManager[Any]] | None = None,
        times: Times | None = None,
        keep_history: bool = False,
    ) -> None:
        holders = plan.holders()
        self.replicas = {stage: ranks for stage, ranks in holders.items() if len(ranks) > 1}
        if tied and self.replicas:
            raise UsageError(
                f"{tied[0]!r} is on several stages, and stage {min(self.replicas)} on"
                f" {len(self.replicas[min(self.replicas)])} ranks; untie it, or give each stage one rank"
            )
        shared = {stage.number: stage.flats[1] for stage in stages if _apart(stage, tied)}
        super().__init__(
            comm,
            plan,
            stages,
            loss,
            tied=tied,
            reduction=reduction,
            prefetch=prefetch,
            coordinates=coordinates,
            times=times,
        )
        self.versions = {
            n: Versions(s.flats[0], make_optimizer(s.flats[0]), self._law(n, False), plan.batch, keep_history)
            for n, s in self.stages.items()
            if len(s.flats[0])
        }
        self.shared_versions = self._shared_versions(comm.dup(), holders, shared, make_optimizer, keep_history)
        self.units: dict[int, list[Versions]] = {
            n: [table[n] for table in (self.versions, self.shared_versions) if n in table] for n in self.stages
        }
        self.optimizers = {n: versions.optimizer for n, versions in self.versions.items()}
        self.history = {n: versions.history for n, versions in self.versions.items()}
        self.versions_used: dict[tuple[str, int, int], int] = {}
        self._numbers = {
            n: sorted(i for (stage, i), rank in self.messages.home.items() if stage == n and rank == comm.rank)
            for n in self.stages
        }
        self._ended: tuple[int, int] | None = None  # (stage, micro-batch) whose gradient is whole and not used yet
        if self.replicas:
            group = comm.split(stages[0].number, comm.rank)  # a rank has one stage
            self.rounds = {
                n: GradientReducer(versions.flat, group, algorithm=reduction, unused="zeros")
                for n, versions in self.versions.items()
                if n in self.replicas
            }

    def _law(self, stage: int, shared: bool) -> Law | None:
        plan = self.plan
        if plan.updates == "2bw":
            return lambda i: max(i // plan.batch - 1, 0)
        if plan.updates == "vertical-sync" or shared:
            delay = plan.stages - 1 - (0 if plan.updates == "vertical-sync" else stage)
            return lambda i: max(0, i - delay)
        return None

    def _shared_versions(
        self,
        comm: Comm,
        holders: dict[int, list[int]],
        shared: dict[int, FlatParameters],
        make_optimizer: Any,
        keep_history: bool,
    ) -> dict[int, Versions]:
        result: dict[int, Versions] = {}
        for number, flat in shared.items():
            groups = [group for group in self.shared.groups if set(group.names) & set(flat.names)]
            places = {site for group in groups for site in group.sites}
            if any(set(group.sites) != places for group in groups) or len({stage for stage, _ in places}) != len(
                places
            ):
                raise UsageError(
                    f"the shared parameters {flat.names} of stage {number} are not all on the same stages; tie those of"
                    " the same stages only"
                )
            law = self._law(min(stage for stage, _ in places), True)
            result[number] = SharedVersions(
                comm, dict(sorted(places)), number, flat, make_optimizer(flat), law, self.plan.batch, keep_history
            )
        return result

    # --- a stream ---

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the stream; the weights are then the latest version, and the next stream starts from it as version 0."""
        self._begun = dict.fromkeys(self.units, 0)  # forwards so far
        for units in self.units.values():
            for versions in units:
                versions.begin()
        return super().step(inputs, targets)

    def _forward(self, stage: int, i: int) -> None:
        self._update()
        self._begun[stage] += 1
        used = [versions.forward(i) for versions in self.units[stage]]
        if used:
            self._note("F", stage, i, used[0])
        super()._forward(stage, i)

    def _backward(self, stage: int, i: int, weights: str) -> None:
        self._update()
        used = [versions.backward(i, self.plan.updates == "no-stash") for versions in self.units[stage]]
        if used:
            self._note("B", stage, i, used[0])
        super()._backward(stage, i, weights)
        self._ended = stage, i

    def _update(self) -> None:
        """Use the gradient of the last backward: not before it was passed on, for other replicas wait in this."""
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
        for versions in self.units[stage]:
            if isinstance(versions, SharedVersions):
                versions.gradient_is_whole((i + 1) // self.plan.batch - 1, entering)
            else:
                versions.update(entering, self.plan.updates == "no-stash")

    def _end_round(self, stage: int, number: int) -> None:
        """One update of a replicated stage: the mean of the round's gradients, added in rank order."""
        replicas = len(self.replicas[stage])
        for versions in self.units[stage]:
            reducer = self.rounds[stage]
            for parameter in reversed(versions.flat.parameters):
                if parameter.requires_grad:
                    parameter.zero_fill() if parameter.grad is None else None
                    reducer.ready(parameter)
            reducer.finish()
            taking_part = min(replicas, self.plan.microbatches - number * replicas)
            scale_gradients_(versions.flat, 1.0 / taking_part)
            versions.update(None, self.plan.updates == "no-stash")

    def _sum_gradients(self) -> None:
        self._update()
        self.messages.finish()
        for stage, ranks in self.replicas.items():
            rounds = -(-self.plan.microbatches // len(ranks))
            if (
                stage in self.stages and len(self._numbers[stage]) < rounds
            ):  # the last round has no mini-batch for this one
                self._end_round(stage, rounds - 1)
        for units in self.units.values():
            for versions in units:
                versions.settle(self.plan.microbatches // self.plan.batch)

    def _note(self, kind: str, stage: int, i: int, version: int) -> None:
        self.versions_used[kind, stage, i] = version
        now = self.comm.time()
        self.comm.trace.spans.append(
            SpanEvent(self.comm.trace.rank, "main", f"version {version} for {stage}{kind}{i}", now, now, "version")
        )


def _apart(stage: PipelineStage, tied: Sequence[str]) -> bool:
    """Make the shared parameters a unit of their own, behind the rest: they have versions of their own. Are there any?"""
    shared = [p for p in stage.parameters if p.requires_grad and p.name in tied]
    if shared:
        own = [p for p in stage.parameters if p not in shared]
        for parameter in stage.parameters:
            parameter.flat = None
        stage.flats = [FlatParameters(own), FlatParameters(shared)]
    return bool(shared)
