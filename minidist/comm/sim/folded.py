"""Ranks that do the same thing are folded: one of each class runs, and stands for all of them.

    16 ranks, classes of 8      0 .. 7 (first stage)   8 .. 15 (second stage)          ranks 0 and 8 run
    rank 0 sends to 8           a message, as ever: every rank k sends the same to k + 8 at the same time
    rank 0 sends to 1, next     every rank of the ring sends to its next one, so rank 0 receives what it sends itself
    in a ring of its class
    all_reduce of ranks 0..7    one event (`collectives/one_event.py`): all ranks of the class come at the same time

The bytes, messages, memory and virtual time are those of all ranks, as long as the ranks of a class do the same at the
same time. The one event may end at other times on other ranks (8 elements over 3 ranks are 3, 3 and 2); then the class
goes on at the latest of them, so its virtual time is an upper bound, and `uneven` names the call. Memory is that of the
first rank of each class. Where reductions run during the computation (ZeRO 2 in a pipeline), how long their buffers
live depends on the order in which streams run, so a peak may differ by a bucket.

What depends on the number of a rank, such as its part of a checkpoint, is computed with a communicator as that rank
sees it (`seen_from`).

What cannot be folded raises UsageError: messages of unlike shapes round a ring, and messages to a rank that does not
run.

Proved by: tests/comm/sim/test_folded.py, tests/train/test_folded_dry_run.py
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from minidist.base.errors import UsageError, quoted
from minidist.comm.call_site import call_site
from minidist.comm.communicator import CheckedComm
from minidist.comm.sim.sim_world import SimWorld
from minidist.comm.sim.watched import Watched
from minidist.core.base import hooks
from minidist.core.base.trace import current_purpose, purpose
from minidist.core.comm.communicator import ANY, Comm, PointToPoint, Work
from minidist.core.comm.sim.matching import Key, SimRequest, Stream


class Ports(NamedTuple):
    """When a stream goes on, and from when on its two ports are free, in seconds."""

    time: float
    out_free: float
    in_free: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a collective call does on each rank of its group, by place: its end, and the messages and bytes sent."""

    ends: Sequence[Ports]
    messages: Sequence[int]
    nbytes: Sequence[int]


class _Share(NamedTuple):
    """What a class's ranks have of an outcome together; end: the latest times, is_even: whether they are equal."""

    end: Ports
    is_even: bool
    messages: int
    nbytes: int


@lru_cache(4096)
def _share(outcome: Outcome, places: tuple[int, ...]) -> _Share:
    """Return what the ranks at these places do together. Equal calls have one outcome, so it is added up once."""
    ends = {outcome.ends[place] for place in places}
    end = Ports(*(max(times) for times in zip(*ends, strict=True)))
    messages, nbytes = (sum(column[place] for place in places) for column in (outcome.messages, outcome.nbytes))
    return _Share(end, len(ends) == 1, messages, nbytes)


@dataclass(frozen=True)
class Computed:
    """An entry of `FoldedWorld.log`: seconds in which a stream computed."""

    seconds: float
    name: str

    def again(self, world: "FoldedWorld") -> None:
        """Compute for the same time."""
        world.compute((), self.seconds, self.name)


@dataclass(frozen=True)
class Called:
    """An entry of `FoldedWorld.log`: a collective call, which is equal to another one when the same happens in both."""

    why: str
    name: str
    operation: str
    outcome: Outcome
    group: PointToPoint = field(compare=False)
    outcome_of: Callable[[tuple[Ports, ...]], Outcome] = field(compare=False)

    def again(self, world: "FoldedWorld") -> None:
        """Make the call."""
        with purpose(self.why):
            world.call(self.group, self.outcome_of)


@dataclass
class _Meeting:
    """A call of several classes, which each wait for the last one. streams, works: by representative."""

    streams: dict[int, Stream] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)


class FoldedComm(CheckedComm):
    """A communicator of a folded world, whose barrier is one event."""

    def barrier(self) -> None:
        hooks.one_event().barrier_as_one_event(self)


class FoldedWorld(SimWorld):
    """A simulated world in which one rank of each class runs, the first one; see the module.

    classes: every rank of the world once. The members of a class do the same, and each of them meets the member at its
    own place in another class, as rank 0 of the module's picture meets rank 8 and rank 1 meets rank 9. The result of a
    rank is that of the first one of its class, whose trace has the totals of the whole class; the others' are empty.

    log: while a rank notes what it does (`pipeline/runtime/repeated.py`), its calls and computations. It becomes None
    when the rank sends a message, meets another class, or lets other streams run: then others take part.
    """

    comm_class = FoldedComm
    folds = unchecked = True
    log: list[Any] | None = None

    def __init__(self, ranks: int, classes: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(ranks, **{"record": "totals", **options, "checks": False})
        if sorted(rank for members in classes for rank in members) != list(range(ranks)):
            raise UsageError(f"the classes {quoted(classes)} do not name each of {ranks} ranks once")
        if self.record is True:
            raise UsageError('a folded world keeps no events: a message stands for many; pass record="totals"')
        self.classes = {members[0]: members for members in classes}
        self.running_ranks = list(self.classes)
        self.representative = [0] * ranks
        for first, members in self.classes.items():
            for rank in members:
                self.representative[rank] = first
        self.uneven = self._uneven = set[str]()  # calls that do not end at the same time on all ranks of a class
        self._places: dict[str, dict[int, tuple[int, ...]]] = {}
        self._meetings: dict[tuple[str, int], _Meeting] = {}

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        self._uneven.clear()
        results = super().run(main, *arguments, **keywords)
        return [results[first] for first in self.representative]

    def _new_matching(self) -> Watched:
        return _FoldedMatching(self)

    def is_folded(self, group: PointToPoint) -> bool:
        """Return whether ranks of the group stand for others of it."""
        return len(self.places_of(group)) < group.size

    def places_of(self, group: PointToPoint) -> dict[int, tuple[int, ...]]:
        """Return the places in the group of each class's ranks, by representative."""
        known = self._places.get(group.name)
        if known is None:
            places: dict[int, list[int]] = {}
            for place, rank in enumerate(group.members):
                places.setdefault(self.representative[rank], []).append(place)
            known = self._places[group.name] = {first: tuple(found) for first, found in places.items()}
        return known

    # a collective call ------------------------------------------------------------------------------------------------

    def call(self, group: Any, outcome_of: Callable[[tuple[Ports, ...]], Outcome]) -> None:
        """Make a collective call of `group` as one event: wait for its other classes, then advance the clocks.

        outcome_of: from when each rank of the group begins, by place, to what happens.
        """
        places, stream = self.places_of(group), self.state.running
        if self.log is not None:
            self._note(group, outcome_of, alone=len(places) == 1 and not self.state.side)

        # One class: all begin now, and a port that has been free for a while is free now.
        if len(places) == 1:
            now = stream.time
            begin = Ports(0.0, max(0.0, stream.out_free - now), max(0.0, stream.in_free - now))
            self._end(stream, group, places[stream.rank], outcome_of((begin,) * group.size), now)

            # The rank's other streams, if any, go on, as they would while the messages are on their way.
            self.switches += 1
            if self.state.side:
                self.state.ready.append(stream)
                self.hub.switch()
                self._switched(stream)
            return

        # Several: the last one to come computes the outcome for all.
        key = group.name, group.tag
        meeting = self._meetings.setdefault(key, _Meeting())
        meeting.streams[stream.rank] = stream
        if len(meeting.streams) < len(places):
            work = Work(group, lambda: None)
            work.site = group.site or group.opened
            work.waiter = stream
            meeting.works.append(work)
            self._block(work)
            return
        del self._meetings[key]
        begins = [Ports(0.0, 0.0, 0.0)] * group.size
        for first, of_class in places.items():
            one = meeting.streams[first]
            for place in of_class:
                begins[place] = Ports(one.time, one.out_free, one.in_free)
        outcome = outcome_of(tuple(begins))
        for one in meeting.streams.values():
            self._end(one, group, places[one.rank], outcome, 0.0)
        self.state.ready.extend(waiting.waiter for waiting in meeting.works)

    def _note(self, group: PointToPoint, outcome_of: Callable[[tuple[Ports, ...]], Outcome], alone: bool) -> None:
        """Add a call to the log, or end the log where other ranks or streams run meanwhile."""
        if not alone or self.log is None:
            self.log = None
            return
        outcome = outcome_of((Ports(0.0, 0.0, 0.0),) * group.size)
        self.log.append(Called(current_purpose(), group.name, group.operation, outcome, group, outcome_of))

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        if self.log is not None:
            seconds += self.links.seconds(list(operations)) if operations else 0.0
            operations = ()
            self.log.append(Computed(seconds, name))
        super().compute(operations, seconds, name)

    def _end(self, stream: Stream, group: PointToPoint, places: tuple[int, ...], outcome: Outcome, base: float) -> None:
        """Advance a stream to the end of a call on its class's ranks, and count what they have sent."""
        share = _share(outcome, places)
        if not share.is_even:
            self._uneven.add(group.operation)
        time, out_free, in_free = share.end
        stream.time, stream.out_free, stream.in_free = base + time, base + out_free, base + in_free

        # The class has as many such groups as its ranks fill.
        trace = self.state.traces[stream.rank]
        groups = trace.ranks // len(places)
        if share.messages:
            trace.add_to_totals(current_purpose(), groups * share.messages, groups * share.nbytes)


def others_of(comm: Comm) -> Sequence[int]:
    """Return the ranks for which the rank of `comm`, a communicator of all ranks, stands; itself is not among them."""
    if not comm.world.folds:
        return ()
    return [rank for rank in cast(FoldedWorld, comm.world).classes[comm.rank] if rank != comm.rank]


def seen_from(comm: Comm, rank: int) -> Comm:
    """Return `comm` as another rank of it sees it, whether this one runs or not. Nothing can be sent with it.

    Groups and meshes can be made of it, so it says which of them the rank is in, and at which place.
    """
    return CheckedComm(_NoMessages(), comm.name, comm.members, rank)


class _NoMessages:
    """The world of a communicator that is seen from another rank."""

    def register(self, *_: Any) -> None:
        """Note nothing: no member of the communicator uses it."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"a communicator that is seen from another rank has no {name}, because nothing is sent with it; use the"
            " communicator that the rank itself has"
        )


class _FoldedMatching(Watched):
    """The messages of the ranks that run: to each other, or round a ring of a class."""

    def __init__(self, world: FoldedWorld) -> None:
        super().__init__(world.state, world._block, world._watchers())
        self.world = world
        for first, members in world.classes.items():
            world.state.traces[first].ranks = len(members)
        self.key_of = self._ring_or_both

    def post(self, comm: Any, kind: str, array: np.ndarray, peer: int, tag: int, nonblocking: bool) -> SimRequest:
        world, other = self.world, comm.members[peer]
        world.log = None
        if peer == ANY:
            site = comm.site or call_site(sys._getframe(1), comm.opened)
            raise UsageError(f"a receive from any rank cannot be folded, at {site}; run every rank")
        if world.representative[other] != other and len(world.places_of(comm)) > 1:
            site = comm.site or call_site(sys._getframe(1), comm.opened)
            raise UsageError(
                f"rank {comm.members[comm.rank]} sends to or receives from rank {other}, which is folded into rank"
                f" {world.representative[other]}, at {site}; run every rank"
            )
        return super().post(comm, kind, array, peer, tag, nonblocking)

    def _ring_or_both(self, send: SimRequest, key: Key) -> Key:
        comm, rank = send.comm, send.stream.rank
        if send.kind == "receive" or not self.world.is_folded(comm):
            return key
        # Round a ring: as this rank sends `distance` places on, the one as many places back sends to it.
        distance = send.peer - comm.rank
        return comm.context, comm.members[(comm.rank - distance) % comm.size], rank, send.tag

    def deliver(self, send: SimRequest, receive: SimRequest) -> None:
        if send.stream.rank == receive.stream.rank and send.array.shape != receive.array.shape:
            raise UsageError(
                f"rank {send.stream.rank} cannot stand for the ranks of {send.comm.name}: it sends an array of shape"
                f" {send.array.shape} and receives one of {receive.array.shape}, so the ranks differ; run every rank"
            )
        super().deliver(send, receive)
