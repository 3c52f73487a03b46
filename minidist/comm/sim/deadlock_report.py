"""What to say when ranks wait forever: who waits for what, at which line, in which circle, and what was meant."""

from typing import TYPE_CHECKING

from minidist.base.errors import DeadlockError
from minidist.comm.call_site import site_of
from minidist.comm.communicator import ANY, Request, Work
from minidist.comm.waiting import Waiting, error_line, find_cycle

if TYPE_CHECKING:
    from minidist.comm.sim.request import Lane, SimRequest
    from minidist.comm.sim.world import SimWorld


def waiting_lanes(world: "SimWorld") -> list[Waiting]:
    """Every blocked lane of a simulated world."""
    return [_waiting(lane) for lane in (*world.mains, *world.lanes.values()) if lane.waiting is not None]


def _waiting(lane: "Lane") -> Waiting:
    item = lane.waiting
    if isinstance(item, Work):
        return Waiting(lane.rank, lane.name, (), f"wait() of {item.describe()}{_waited_at(lane, item)}")
    assert isinstance(item, Request)
    members = item.comm.members
    peers = tuple(m for m in members if m != lane.rank) if item.peer == ANY else (members[item.peer],)
    return Waiting(lane.rank, lane.name, peers, item.describe() + _waited_at(lane, item))


def _waited_at(lane: "Lane", item: Request | Work) -> str:
    """Where the wait is, when that is another line than the post. A lane's own stack has nothing of the user in it."""
    frame = lane.greenlet.gr_frame if lane.greenlet is not None and lane.is_main else None
    site = site_of(frame) if frame is not None else item.site
    return "" if site == item.site else f", waited for at {site}"


def _hints(world: "SimWorld", waiting: list[Waiting]) -> list[str]:
    hints = []
    for w in waiting:
        if len(w.peers) == 1 and w.peers[0] in world.returned:
            hints.append(f"rank {w.peers[0]} has returned: it will never answer rank {w.rank}")
    queued: dict[int, list[SimRequest]] = {}
    for (_, _, destination, _), sends in world.sends.items():
        queued.setdefault(destination, []).extend(sends)
    for lane in (*world.mains, *world.lanes.values()):
        item = lane.waiting
        if not isinstance(item, Request) or item.kind != "receive":
            continue
        source = None if item.peer == ANY else item.comm.members[item.peer]
        for send in [s for s in queued.get(lane.rank, ()) if source in (None, s.lane.rank)][:2]:
            hints.append(
                f"rank {lane.rank} waits for {_which(item)}, but queued from rank {send.lane.rank} is {_which(send)} "
                f"({send.array.nbytes} B, sent at {send.site})"
            )
    messages = [lane.waiting for lane in (*world.mains, *world.lanes.values()) if isinstance(lane.waiting, Request)]
    if messages and all(item.kind == "send" for item in messages):
        hints.append("everybody sends and nobody receives: let some ranks receive first, or use sendrecv or isend")
    return hints


def _which(request: Request) -> str:
    """What decides whether two sides of a message meet, beside the two ranks."""
    where = "" if request.comm.name == "world" else f" on {request.comm.name}"
    return (
        f"tag {request.tag}{where}"
        if request.operation == "message"
        else f"call {request.tag}{where}, {request.operation}"
    )


def deadlock(world: "SimWorld") -> DeadlockError:
    """The error for a world in which no lane can run any more."""
    waiting = waiting_lanes(world)
    shown = waiting if len(waiting) <= 16 else waiting[:16]
    lines = [f"deadlock: {len({w.rank for w in waiting})} of {world.size} ranks wait and nobody can end their wait"]
    lines += [f"  {w}" for w in shown]
    if len(waiting) > len(shown):
        lines.append(f"  ... and {len(waiting) - len(shown)} more")
    for lane in [lane for lane in (*world.mains, *world.lanes.values()) if lane.waiting and lane.handling][:6]:
        lines.append(f"  rank {lane.rank} waits while it handles {error_line(lane.handling)}")
    lines += [f"  rank {rank} was killed at virtual time {time:.6g} s" for rank, time in sorted(world.dead.items())[:6]]
    cycle = find_cycle(waiting)
    if cycle:
        lines.append("  circle: " + " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])))
    lines += [f"  hint: {hint}" for hint in _hints(world, waiting)[:6]]
    return DeadlockError("\n".join(lines), waiting, cycle)
