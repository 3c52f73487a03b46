"""Killing a rank on purpose: what becomes of its messages, and how the others learn that it is gone.

A killed rank stops where it stands, in all its lanes, and never communicates again (its `finally` blocks run, as Python
has it, but a message there ends them). What it had sent *buffered* is on the wire and still arrives; a synchronous send
that nobody had received is gone, like its receives.

    rank 1 waits for rank 2 ──┐
    rank 0 waits for anybody ─┤      rank 2 is killed
                              ├─▶ rank 1: RankDeadError at once, in its wait; it may catch it and go on
                              └─▶ rank 0: goes on with the others; only when nobody else can send, RankDeadError, once

So whoever waits on a dead rank by name is told whenever it does; whoever waits for anybody is told of each death at
most
once, and only when it would otherwise wait forever: the detector is never wrong, because in this world it is known when
nobody can run. On the clock the news takes one latency. MPI's own rule is harsher: a process that dies ends the job
(the
proposal for more is ULFM: Bland et al., Post-failure recovery of MPI communication capability, IJHPCA 27, 2013, whose
rules for named and for wildcard receives these are).
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from greenlet import GreenletExit, getcurrent

from minidist.base.errors import RankDeadError, UsageError
from minidist.comm.communicator import ANY
from minidist.comm.sim import queues
from minidist.comm.sim.request import Lane, SimRequest

if TYPE_CHECKING:
    from minidist.comm.sim.world import SimWorld


class Deaths:
    """Who has died in this run, at what virtual time (`times`), and who is going to (`doomed`: messages left to post)."""

    def __init__(self, world: "SimWorld", doomed: dict[int, int]) -> None:
        self.world, self.doomed = world, dict(doomed)
        self.times: dict[int, float] = {}
        self.told: set[tuple[int, int]] = set()  # (who, of whose death)

    def before_post(self, rank: int) -> None:
        """A rank is about to post a message: dead ranks cannot, and a doomed one may die here."""
        if rank in self.times:
            raise GreenletExit
        if rank in self.doomed:
            if self.doomed[rank] == 0:
                del self.doomed[rank]
                self.kill(rank)
            else:
                self.doomed[rank] -= 1

    def kill(self, rank: int) -> None:
        """Stop a rank here and now. Does not return when it is the caller's own."""
        world = self.world
        caller = world.running
        if rank in self.times:
            return
        self.times[rank] = max(world.mains[rank].time, caller.time)
        if world.on_failure == "end":
            raise RankDeadError(
                f"rank {rank} was killed at virtual time {self.times[rank]:.6g} s and the run ends, as a job under MPI "
                'would; SimWorld(on_failure="isolate") lets the others go on',
                rank,
            )
        self._bury(rank)
        for lane in self._lanes(rank):
            if lane is not caller and lane.greenlet is not None and not lane.greenlet.dead:
                lane.greenlet.parent = getcurrent()  # where control goes when it has ended
                world.running = lane
                with suppress(Exception):  # of its own `finally`
                    lane.greenlet.throw(GreenletExit)
        world.running = caller
        if caller.rank == rank:
            raise GreenletExit

    def _lanes(self, rank: int) -> list[Lane]:
        return [lane for lane in (*self.world.mains, *self.world.lanes.values()) if lane.rank == rank]

    def _bury(self, rank: int) -> None:
        """Take a dead rank's requests away and tell those who wait on it by name."""
        world = self.world
        for event in world.traces[rank].messages:
            if event.end < 0:  # nothing of a dead rank's is pending
                event.start = max(event.start, event.posted)
                event.end = max(event.start, self.times[rank])
        world.unwaited[rank].clear()
        world.posted[rank].clear()
        for key in [key for key in world.sends if key[1] == rank]:
            for request in [request for request in world.sends[key] if not request.eager]:
                queues.remove(world.sends, key, request)
        for wild in [wild for wild in world.wildcards if wild[1] == rank]:
            del world.wildcards[wild]
        for key in [key for key in world.receives if key[2] == rank]:
            del world.receives[key]
        for key in [key for key in world.sends if key[2] == rank]:
            for request in world.sends.pop(key):
                if not request.eager:
                    self.fail(request, rank)
        for key in [key for key in world.receives if key[1] == rank and key not in world.sends]:
            for request in world.receives.pop(key):
                self.fail(request, rank)

    def fail(self, request: SimRequest, dead: int) -> None:
        """The request cannot complete any more: its wait raises."""
        who = request.lane.rank
        self.told.add((who, dead))
        others = "; nobody else sends to it" if request.peer == ANY else ""
        request.error = RankDeadError(
            f"rank {who}: its {request.describe()} cannot complete: rank {dead} died at virtual time "
            f"{self.times[dead]:.6g} s{others}; catch RankDeadError and go on without it, or let it end the run",
            dead,
        )
        if request.waiter is not None:
            self.world.ready.append(request.waiter)
            request.waiter = None

    def tell(self) -> bool:
        """Nobody can run: tell those who wait for a dead rank, or for anybody, of a death that they have not heard of."""
        world, told = self.world, False
        for lane in (*world.mains, *world.lanes.values()):
            request = lane.waiting
            if lane.rank in self.times or not isinstance(request, SimRequest) or request.error is not None:
                continue
            members = request.comm.members
            if request.peer == ANY:
                news = [rank for rank in sorted(self.times) if rank in members and (lane.rank, rank) not in self.told]
            else:
                news = [members[request.peer]] if members[request.peer] in self.times else []
            if not news:
                continue
            if request.kind == "send":
                queues.remove(world.sends, (request.comm.context, lane.rank, news[0], request.tag), request)
            elif request.peer == ANY:
                queues.remove(world.wildcards, (request.comm.context, lane.rank, request.tag), request)
                world.match_waiting(request.comm.context, lane.rank, request.tag)
            else:
                queues.remove(world.receives, (request.comm.context, news[0], lane.rank, request.tag), request)
            self.fail(request, news[0])
            told = True
        return told


def check_rank(world: "SimWorld", rank: int) -> None:
    """Raise UsageError for a rank that is none."""
    if not 0 <= rank < world.size:
        raise UsageError(f"kill names rank {rank}, but the world has ranks 0..{world.size - 1}")
