"""PipeDream: weights change while micro-batches are on their way, so each keeps the version that it began with.

    stage 0, p = 3    F0 F1 F2 B0 | F3 B1 | F4 B2 | ...       | an update
    version            0  0  0  0 |  1  0 |  2  0 | ...       F3 sees version 1; B1 comes after it and still needs version 0

An update is out of place: a new array, so an older one lives for as long as a micro-batch needs it. Which version is used:

    stash           F: the latest, max(0, t-(p-1-s)) on stage s; B: the same array (weight stashing)
    no-stash        F: the latest; B: the latest by then, which is the gradient of no function (to see what goes wrong)
    vertical-sync   max(0, t-(p-1)) on every stage: the version that stage 0 had when t entered
    2bw             max(t//m - 1, 0) on every stage, one update a batch of m micro-batches

Sources: Harlap et al., arXiv:1806.03377; Narayanan et al., PipeDream-2BW, ICML 2021.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.memory import track
from minidist.base.trace import SpanEvent
from minidist.comm import Comm
from minidist.nn.flat import FlatParameters
from minidist.pipeline.plan import Plan
from minidist.pipeline.runtime.pipeline import Loss, Pipeline
from minidist.pipeline.runtime.stages import PipelineStage
from minidist.pipeline.timing import Times


@dataclass
class Versions:
    """One stage's weights: version -> flat array, and the version that each micro-batch on its way uses."""

    flat: FlatParameters
    arrays: dict[int, Any] = field(default_factory=dict)
    latest: int = 0
    used: dict[int, int] = field(default_factory=dict)
    most: int = 1  # versions alive at once

    def bind(self, version: int, seen_as: int | None = None) -> None:
        """Make `version` the weights that compute; `seen_as`: the version that forward noted, when it is another one."""
        self.flat.bind(self.arrays[version], version if seen_as is None else seen_as)


class PipeDream(Pipeline):
    """One rank's stage of an asynchronous pipeline; `step` runs a whole stream of micro-batches, updates included.

    make_optimizer(flat): the optimizer of a stage's parameters; its state is that of the latest version. history: the flat
    weights after each update, version 0 first, of every stage with parameters (only with keep_history=True). versions_used:
    (kind, stage, micro-batch) -> version, also in the trace as spans of category "version".

    Sends what a `Pipeline` sends. Raises UsageError for a plan with a flush (use `Pipeline`), for tied parameters, whose two
    copies would have different delays, and for a stage on several ranks.
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
        prefetch: int = 1,
        coordinates: Callable[[int], AbstractContextManager[Any]] | None = None,
        times: Times | None = None,
        keep_history: bool = False,
    ) -> None:
        if tied:
            raise UsageError(
                f"{tied[0]!r} is on several stages, and with delayed updates its copies would drift apart; untie it, or use a "
                "synchronous schedule such as 1f1b"
            )
        if any(len(ranks) > 1 for ranks in plan.holders().values()):
            raise UsageError(f"plan {plan.name!r} has a stage on several ranks, which asynchronous updates do not support; give each stage one rank")
        super().__init__(comm, plan, stages, loss, prefetch=prefetch, coordinates=coordinates, times=times)
        self.versions = {n: Versions(s.flat, {0: s.flat.data}) for n, s in self.stages.items() if len(s.flat)}
        self.optimizers = {n: make_optimizer(versions.flat) for n, versions in self.versions.items()}
        self.keep_history = keep_history
        self.history = {n: [xp.array(versions.flat.data)] for n, versions in self.versions.items()}
        self.versions_used: dict[tuple[str, int, int], int] = {}

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the stream; the weights are then the latest version, and the next stream starts from it as version 0."""
        for versions in self.versions.values():
            versions.arrays, versions.latest = {0: versions.arrays[versions.latest]}, 0
            versions.bind(0)
        self.zero_grad()
        losses = super().step(inputs, targets)
        for versions in self.versions.values():
            versions.bind(versions.latest)
        return losses

    def _forward(self, stage: int, i: int) -> None:
        versions = self.versions.get(stage)
        if versions is not None:
            versions.used[i] = self._version_for(versions, i)
            versions.bind(versions.used[i])
            self._note("F", stage, i, versions.used[i])
        super()._forward(stage, i)

    def _version_for(self, versions: Versions, i: int) -> int:
        if self.plan.updates == "vertical-sync":
            return max(0, i - (self.plan.ranks - 1))
        return max(i // self.plan.batch - 1, 0) if self.plan.updates == "2bw" else versions.latest

    def _backward(self, stage: int, i: int, weights: str) -> None:
        versions = self.versions.get(stage)
        if versions is None:
            super()._backward(stage, i, weights)
            return
        forward = versions.used.pop(i)
        version = versions.latest if self.plan.updates == "no-stash" else forward
        versions.bind(version, forward)
        self._note("B", stage, i, version)
        super()._backward(stage, i, weights)
        if (i + 1) % self.plan.batch == 0:
            self._update(stage, versions, i)

    def _update(self, stage: int, versions: Versions, i: int) -> None:
        """A new version, out of place; then what no micro-batch will need again is let go."""
        new = track(xp.array(versions.arrays[versions.latest]), "stash" if versions.used else "parameter")
        versions.flat.bind(new, versions.latest)
        self.optimizers[stage].step()
        versions.flat.zero_grad()
        versions.latest += 1
        versions.arrays[versions.latest] = new
        if self.keep_history:
            self.history[stage].append(xp.array(new))
        entering = max(versions.used, default=i) + 1  # the next forward's micro-batch
        needed = {versions.latest} if self.plan.updates == "no-stash" else {versions.latest, *versions.used.values()}
        if entering < self.plan.microbatches:
            needed.update(range(self._version_for(versions, entering), versions.latest))
        versions.arrays = {version: array for version, array in versions.arrays.items() if version in needed}
        versions.most = max(versions.most, len(versions.arrays))

    def _note(self, kind: str, stage: int, i: int, version: int) -> None:
        self.versions_used[kind, stage, i] = version
        now = self.comm.time()
        self.comm.trace.spans.append(SpanEvent(self.comm.trace.rank, "main", f"version {version} for {stage}{kind}{i}", now, now, "version"))
