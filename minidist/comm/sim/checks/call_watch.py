"""The calls of all ranks must agree: the headers of messages that meet, the roots, the members of communicators.

    rank 0   broadcast root 0 ──┐   the second one differs: no stream runs on, and `look_ahead` asks what the
    rank 1   broadcast root 1 ──┘   ranks would have called next, so that the error can name the cause

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_misuse.py, tests/comm/sim/test_look_ahead.py
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from types import FrameType, TracebackType
from typing import NamedTuple

from minidist.comm.call_log import Call, CallLog
from minidist.comm.call_site import NOWHERE, call_site
from minidist.comm.communicator import Claim, unlike_claims
from minidist.comm.header import compare, header_of, is_of_replicas
from minidist.comm.message_checks import OWN_TAG
from minidist.comm.sim.state import RunState
from minidist.comm.tags import LocatedRequest
from minidist.core.base.errors import MismatchError
from minidist.core.base.fibers import current
from minidist.core.comm.communicator import MAX_TAG, PointToPoint, Request, Work
from minidist.core.comm.sim.matching import Stream

KEPT_CALLS = 8  # of a rank: sends are synchronous, so no rank is far ahead; and there may be 10,000 ranks


class UnlikeCalls(NamedTuple):
    """Two ranks have made unlike calls. sizes: the arrays have not fitted. ready: the streams that could go on."""

    error: MismatchError
    name: str  # of the communicator
    number: int  # of the call
    sizes: bool
    ready: list[Stream]


class CallWatch:
    """What the ranks of a run have called. block: let other streams run.

    unlike: two ranks' calls differ, which ends the run.
    """

    def __init__(self, state: RunState, block: Callable[[Request | Work], None]) -> None:
        self.state, self.block = state, block
        self.logs: dict[str, dict[int, CallLog]] = defaultdict(dict)  # by communicator and world rank
        self.claims: dict[tuple[str, int], Claim] = {}  # by origin and world rank
        self.values: dict[tuple[str, int], tuple[int, int]] = {}  # of a call: the first rank's, and who has come
        self.unlike: UnlikeCalls | None = None

    def calls(self, name: str) -> dict[int, Iterable[Call]]:
        """Return the last collective calls on the communicator `name`, by world rank."""
        return {rank: log.recent for rank, log in self.logs[name].items()}

    def explain(self, name: str, ended: Collection[int] = ()) -> str:
        """Return the sentence about the calls of a communicator in which ranks differ, "" if none is known."""
        from minidist.comm.unlike_calls import unlike_calls

        return unlike_calls(name, self.calls(name), ended)

    def register(self, comm: PointToPoint, origin: str, label: str) -> None:
        """Raise MismatchError when another member made this communicator of other ranks, or with another label."""
        claims, dead = self.claims, self.state.dead
        rank, members = comm.members[comm.rank], comm.members
        self.logs[comm.name][rank] = CallLog(KEPT_CALLS)
        mine = Claim(origin, rank, members, label, NOWHERE)
        first = claims.get((origin, rank))

        # The first member that comes claims the communicator for all members; what a dead rank claimed counts no more.
        if first is None or first.rank in dead:
            mine = mine._replace(site=call_site(sys._getframe(1)))
            for member in members:
                other = claims.setdefault((origin, member), mine)
                if other is not mine and other.rank not in dead:
                    raise unlike_claims(mine, other)
                claims[origin, member] = mine
        elif not first.agrees(mine):
            raise unlike_claims(mine._replace(site=call_site(sys._getframe(1))), first)

    def differs(self, call: PointToPoint, value: int) -> bool:
        """Return whether another rank has begun this call with another value."""
        # The first rank's value, and how many ranks have come.
        key = call.name, call.tag
        first, count = self.values.get(key, (value, 0))
        self.values[key] = first, count + 1
        if count + 1 == call.size:
            del self.values[key]
        return value != first

    def meet(self, send: LocatedRequest, receive: LocatedRequest) -> bool:
        """Raise when the two sides of a message differ."""
        source, target = send.array, receive.array
        if (
            send.comm.match_key == receive.comm.match_key
            and source.dtype == target.dtype
            and source.shape == target.shape
        ):
            return False
        lines = f"{send.site}" if send.site == receive.site else f"{send.site} (sender) and {receive.site} (receiver)"
        ours, theirs = header_of(receive.comm.match_key, target), header_of(send.comm.match_key, source)
        try:
            compare(theirs, ours, send.stream.rank, receive.stream.rank, lines)
        except MismatchError as error:
            # A receive from any rank gets its message from the scheduler, which cannot pause as a rank can.
            in_calls = None not in (send.comm.opened, receive.comm.opened) and current() is self.state.running.fiber
            if not in_calls or is_of_replicas(ours.operation) or is_of_replicas(theirs.operation):
                raise
            self.refuse(error, receive.comm, ours.operation == theirs.operation)
            self.block(send if send.stream is self.state.running else receive)
        return True  # while the world looks ahead

    def refuse(self, error: MismatchError, call: PointToPoint, sizes: bool) -> None:
        """End the run with an error about two ranks' calls, as soon as the stream that runs has paused."""
        # The stack of the rank that has noticed it, as an exception raised there would have it.
        frame: FrameType | None = sys._getframe(1)
        steps: TracebackType | None = None
        while frame is not None:
            steps = TracebackType(steps, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        state = self.state
        numbers = [number for number, *_ in self.logs[call.name][state.running.rank].recent]
        number = next((number for number in reversed(numbers) if number % (MAX_TAG + 1) == call.tag % OWN_TAG), 0)
        self.unlike = UnlikeCalls(error.with_traceback(steps), call.name, number, sizes, list(state.ready))
        state.ready.clear()
