"""The versions of a unit's weights that micro-batches on their way still need, and which of them each one uses.

    versions kept   v3 (latest)  v2  v1        micro-batch 3 began with v1, so its B computes with v1: bind it again
                     ▲ an update makes a new array; an old one lives until the last micro-batch that began with it ends

A unit is a stage's parameters, or those that several stages share: these have one delay everywhere, that of the first
stage that has them, so that every copy of version v is the same bits, and with replicas one round of micro-batches.

Proved by: tests/pipeline/test_pipedream.py
"""

from collections.abc import Callable, Sequence
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose, track
from minidist.core.comm import Comm
from minidist.core.comm.communicator import Request
from minidist.core.nn.flat import FlatParameters
from minidist.core.pipeline.runtime.reduction import Place

VersionRule = Callable[[int], int]  # micro-batch -> the version of its forward


class UnitVersions:
    """The weights of one unit.

    rule: the version by micro-batch; None: the latest there is (`stash`, where the order of actions makes the delay).
    arrays: version -> flat array. latest: number of updates. used: version by micro-batch on its way. most: versions
    alive at once. optimizer: its state is that of the latest version. gradient: with keep_gradient, a copy of that of
    the latest update. history: with keep_history, whose memory grows with the updates, copies of all versions.
    """

    def __init__(
        self,
        flat: FlatParameters,
        optimizer: Any,
        rule: VersionRule | None,
        keep_history: bool,
        keep_gradient: bool = False,
    ) -> None:
        self.flat, self.optimizer, self.rule = flat, optimizer, rule
        self.keep_history, self.keep_gradient = keep_history, keep_gradient
        self.arrays: dict[int, Any] = {0: flat.data}
        self.history = [_copy(flat.data)] if keep_history else []
        self.gradient: Any = None
        self.used: dict[int, int] = {}
        self.latest, self.most = 0, 1

    @property
    def weights(self) -> Any:
        """The latest version."""
        return self.arrays[self.latest]

    def begin(self) -> None:
        """Begin a stream: the latest version is its version 0."""
        self.arrays, self.latest = {0: self.arrays[self.latest]}, 0
        self.used.clear()
        self.flat.bind(self.arrays[0], 0)
        self.flat.zero_grad()

    def forward(self, i: int) -> int:
        """Bind what micro-batch i's forward sees and return its version."""
        version = self.latest if self.rule is None else self.rule(i)
        self.used[i] = version
        self.flat.bind(self.arrays[version], version)
        return version

    def recompute(self, i: int) -> None:
        """Bind what micro-batch i's forward saw, for a second forward."""
        self.flat.bind(self.arrays[self.used[i]], self.used[i])

    def backward(self, i: int, newest: bool) -> int:
        """Bind what its backward sees and return its version: the same, or (newest) the latest, a wrong gradient."""
        seen = self.used.pop(i)
        version = self.latest if newest else seen
        self.flat.bind(self.arrays[version], seen)
        return version

    def update(self, entering: int | None, newest: bool) -> None:
        """Make a new version, out of place, and free those that no micro-batch will need again.

        entering: the next micro-batch to come.
        """
        new = track(xp.array(self.arrays[self.latest]), "stash" if self.used else "parameter")
        self.flat.bind(new, self.latest)
        self.optimizer.step()
        if self.keep_history:
            self.history.append(_copy(new))
        if self.keep_gradient:
            self.gradient = _copy(self.flat.grad)
        self.flat.zero_grad()

        # Needed: the latest, those in use, and all that the next micro-batch's rule may name.
        self.latest += 1
        self.arrays[self.latest] = new
        needed = {self.latest} if newest else {self.latest, *self.used.values()}
        if entering is not None and self.rule is not None:
            needed.update(range(self.rule(entering), self.latest))
        self.arrays = {version: array for version, array in self.arrays.items() if version in needed}
        self.most = max(self.most, len(self.arrays))

    def settle(self, updates: int) -> None:
        """End a stream of `updates` updates: from now on compute with the latest version."""
        self.flat.bind(self.arrays[self.latest], self.latest)


def _copy(array: xp.Array) -> xp.Array:
    return track(xp.array(array), "workspace")


class SharedUnitVersions(UnitVersions):
    """The unit of parameters that live on several stages, on one rank of one of them.

    places: (stage, rank) of all that have them, in order; own: this one. round: micro-batches of one update.

    The first place receives the others' sums of a round, adds them in the order of the places and sends the total back;
    each makes the same update. The others take a total when they need its version, which they have to wait for no
    longer than for the micro-batch that needs it. Sends (purpose tied), per update: one array of the unit's size from
    each other place, one to it.
    """

    def __init__(self, comm: Comm, places: Sequence[Place], own: Place, round: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.comm, self.places, self.own, self.round = comm, list(places), own, round
        self.first = self.places[0]
        self.sends: list[tuple[int, Request]] = []

    def forward(self, i: int) -> int:
        """Bind as any unit does, after the totals that are still missing have been taken."""
        assert self.rule is not None
        while self.own != self.first and self.latest < self.rule(i):
            self._take_total(i)
        return super().forward(i)

    def gradient_is_whole(self, number: int, entering: int | None, factor: float) -> None:
        """Use this place's part of update `number`: the first place adds all parts, the others send theirs.

        factor: by which the sum is multiplied, 1 / the micro-batches of the round for their mean.
        """
        mine = self.flat.grad
        with purpose("tied"):
            if self.own != self.first:
                part = track(xp.array(mine), "communication")
                self.flat.zero_grad()
                self.sends.append((number, self.comm.isend(part, self.first[1], 0)))
                return
            self._release(self.rule(number * self.round) if self.rule else number)
            for _, rank in self.places[1:]:
                part = track(xp.empty_like(mine), "communication")
                self.comm.recv(part, rank, 0)
                mine += part
            if factor != 1.0:
                mine *= mine.dtype.type(factor)
            for _, rank in self.places[1:]:
                self.sends.append((number, self.comm.isend(track(xp.array(mine), "communication"), rank, 1)))
        self.update(entering, False)

    def _take_total(self, entering: int | None) -> None:
        started = [
            (p, xp.array(p.grad)) for p in self.flat.parameters if p.requires_grad and p.grad is not None
        ]  # a later batch's
        with purpose("tied"):
            self.comm.recv(self.flat.grad, self.first[1], 1)
        number = self.latest
        self.update(entering, False)
        self._release(number + 1)
        for parameter, gradient in started:
            parameter.grad = gradient

    def _release(self, before: int) -> None:
        """Wait for totals (parts) of updates below `before`: they have arrived, their receivers have sent since."""
        for number, request in self.sends:
            if number < before:
                self.comm.wait(request)
        self.sends = [(number, request) for number, request in self.sends if number >= before]

    def settle(self, updates: int) -> None:
        """Take the totals that are still on their way, so that every copy ends as the same version."""
        while self.own != self.first and self.latest < updates:
            self._take_total(None)
        self._release(updates)
        super().settle(updates)
