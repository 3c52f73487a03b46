"""What a deadlock error says: which rank waits for what, at which line, in which circle, and what was probably meant.

Proved by: tests/comm/sim/test_world.py
"""

from collections.abc import Callable
from typing import Any

from minidist.comm.call_site import call_site
from minidist.comm.sim.deadlock_hints import hints
from minidist.comm.sim.state import RunState
from minidist.comm.waiting import Waiting, circle_text, error_line, find_cycle
from minidist.core.base.errors import DeadlockError
from minidist.core.comm.communicator import ANY, Work
from minidist.core.comm.sim.matching import Stream

MAX_STREAMS, MAX_LINES = 16, 6  # that are shown; a report must be read on a screen


def deadlock(state: RunState, blocked: list[Stream], explain: Callable[[str], str]) -> DeadlockError:
    """Return the error for a run in which no stream can run any more. explain: see `deadlock_hints.hints`."""
    # What every blocked stream waits in.
    waiting = [_waiting(stream) for stream in blocked]
    ranks = {w.rank for w in waiting}
    lines = [f"deadlock: {len(ranks)} of {state.size} ranks are blocked and none can make progress"]
    lines += [f"  {w}" for w in waiting[:MAX_STREAMS]]
    if len(waiting) > MAX_STREAMS:
        lines.append(f"  ... and {len(waiting) - MAX_STREAMS} more")

    # An exception that led into a wait is often the cause, and would not be seen otherwise.
    for stream in [stream for stream in blocked if stream.handling][:MAX_LINES]:
        lines.append(f"  rank {stream.rank} waits while it handles {error_line(stream.handling)}")
    killed = sorted(state.dead.items())[:MAX_LINES]
    lines += [f"  rank {rank} was killed at virtual time {time:.6g} s" for rank, time in killed]

    # The circle of waits, and what was probably meant.
    cycle = find_cycle(waiting)
    if cycle:
        lines.append(f"  circle: {circle_text(cycle)}")
    lines += [f"  hint: {hint}" for hint in hints(state, blocked, waiting, explain)[:MAX_LINES]]
    return DeadlockError("\n".join(lines), waiting, cycle)


def _waiting(stream: Stream) -> Waiting:
    """Describe one blocked stream, with the line of the wait when that is another one than the post's."""
    item: Any = stream.waiting
    assert item is not None
    # A suspended fiber's stack shows where the program waits, which may be far from where it posted.
    frame = stream.fiber.gr_frame if stream.fiber is not None and stream.is_main else None
    site = call_site(frame) if frame is not None else item.site  # no user code is on another stream's stack
    waited_at = "" if site == item.site else f", waited for at {site}"

    # A work has no peers: its stream is blocked too and says which rank it waits for.
    if isinstance(item, Work):
        return Waiting(stream.rank, stream.name, (), f"wait() of {item.describe()}{waited_at}")
    members = item.comm.members
    peers = tuple(m for m in members if m != stream.rank) if item.peer == ANY else (members[item.peer],)
    return Waiting(stream.rank, stream.name, peers, item.describe() + waited_at)
