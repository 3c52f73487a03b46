"""What to say when ranks wait forever: who waits for what, at which line, in which circle, and what might be meant instead."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidist.base.errors import DeadlockError
from minidist.comm.communicator import ANY, Request, Work

if TYPE_CHECKING:
    from minidist.comm.simulated import Lane, SimWorld


@dataclass(frozen=True)
class Waiting:
    """One blocked lane: `peers` are the world ranks that could end its wait."""

    rank: int
    lane: str
    peers: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        lane = "" if self.lane == "main" else f" ({self.lane})"
        return f"rank {self.rank}{lane} waits in {self.what}"


def waiting_lanes(world: "SimWorld") -> list[Waiting]:
    """Every blocked lane of a simulated world."""
    return [_waiting(lane) for lane in (*world.mains, *world.lanes.values()) if lane.waiting is not None]


def _waiting(lane: "Lane") -> Waiting:
    item = lane.waiting
    if isinstance(item, Work):
        return Waiting(lane.rank, lane.name, (), f"wait() of {item.describe()}")
    assert isinstance(item, Request)
    members = item.comm.members
    peers = tuple(m for m in members if m != lane.rank) if item.peer == ANY else (members[item.peer],)
    return Waiting(lane.rank, lane.name, peers, item.describe())


def find_cycle(waiting: list[Waiting]) -> list[int]:
    """A circle of ranks of which each waits only for the next, or []. Starts at its smallest rank."""
    next_of = {w.rank: w.peers[0] for w in waiting if len(w.peers) == 1}
    for start in sorted(next_of):
        path = [start]
        while path[-1] in next_of and next_of[path[-1]] not in path:
            path.append(next_of[path[-1]])
        if path[-1] in next_of:
            circle = path[path.index(next_of[path[-1]]) :]
            smallest = circle.index(min(circle))
            return circle[smallest:] + circle[:smallest]
    return []


def _hints(world: "SimWorld", waiting: list[Waiting]) -> list[str]:
    hints = []
    for w in waiting:
        for peer in w.peers[:1] if len(w.peers) == 1 else ():
            if peer in world.returned:
                hints.append(f"rank {peer} has returned: it will never answer rank {w.rank}")
    for lane in (*world.mains, *world.lanes.values()):
        item = lane.waiting
        if not isinstance(item, Request) or item.kind != "receive":
            continue
        queued = [r for (_, source, to, _), q in world.sends.items() if to == lane.rank for r in q
                  if item.peer == ANY or source == item.comm.members[item.peer]]  # fmt: skip
        for send in queued[:2]:
            name = "" if send.operation == item.operation else f" of {send.operation}"
            hints.append(
                f"rank {lane.rank} waits for tag {item.tag}, but queued from rank {send.state.lane.rank} is tag {send.tag}{name} "
                f"({send.array.nbytes} B, sent at {send.site})"
            )
    if waiting and all(w.what.startswith(("send", "message")) or ": send" in w.what for w in waiting if w.peers):
        hints.append("everybody sends and nobody receives: let some ranks receive first, or use sendrecv or isend")
    return hints


def deadlock(world: "SimWorld") -> DeadlockError:
    """The error for a world in which no lane can run any more."""
    waiting = waiting_lanes(world)
    shown = waiting if len(waiting) <= 16 else waiting[:16]
    lines = [f"deadlock: {len({w.rank for w in waiting})} of {world.size} ranks wait and nobody can end their wait"]
    lines += [f"  {w}" for w in shown]
    if len(waiting) > len(shown):
        lines.append(f"  ... and {len(waiting) - len(shown)} more")
    cycle = find_cycle(waiting)
    if cycle:
        lines.append("  circle: " + " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])))
    lines += [f"  hint: {hint}" for hint in _hints(world, waiting)[:6]]
    error = DeadlockError("\n".join(lines))
    error.waiting, error.cycle = waiting, cycle  # type: ignore[attr-defined]
    return error
