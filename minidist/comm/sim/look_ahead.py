"""What the ranks would have called next, after two of them have made different collective calls.

The first difference does not say what is wrong: has a rank skipped this call, or does it make two calls in another
order? And ranks that come later have not made theirs yet. So the run goes on for a moment before its error is raised:
every message is complete at once and carries zeros, nothing is printed, no file can be opened, and a rank stops when it
has made CALLS more calls, or after SECONDS of all ranks together.

    rank 0   call 3  all_reduce of float32[128] ╳        ── zeros ──▶  call 4  all_reduce of float32[8]  ...
    rank 1   call 3  all_reduce of float32[8]   ╳        ── zeros ──▶  call 4  barrier                   ...
             ⇒ rank 1 made no call like call 3; its later calls are rank 0's, one earlier

What a program decides by the numbers that it has received it may decide otherwise on zeros; the calls before the
difference do not depend on this. Where a system has no limit on open files, the calls that are known must do.

Proved by: tests/comm/sim/test_look_ahead.py
"""

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np

from minidist.comm.sim.checks import UnlikeCalls
from minidist.comm.sim.watched import RunState
from minidist.comm.unlike_calls import unlike_calls
from minidist.core.base.errors import MismatchError
from minidist.core.base.fibers import FiberExit
from minidist.core.comm.communicator import ANY, PointToPoint, Request
from minidist.core.comm.sim.matching import Stream

CALLS = 7  # one less than a world keeps for reports, so that the call that differs is still known
SECONDS = 2.0

if sys.platform in ("win32", "emscripten"):

    @contextmanager
    def no_files() -> Iterator[bool]:
        """Yield False: nothing here keeps a program from writing files."""
        yield False
else:
    import resource

    @contextmanager
    def no_files() -> Iterator[bool]:
        """Let the process open no file and no connection inside the block."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            yield True
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def look_ahead(world: Any, unlike: UnlikeCalls) -> MismatchError:
    """Return the error of two different calls with what all ranks call then; the first error if this adds nothing."""
    state: RunState = world.state
    error, name, number, sizes, _ = unlike
    with no_files() as safe, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        if safe:
            _run_on(world, state, unlike)
    found = unlike_calls(name, world.calls.calls(name), state.returned, number if sizes else None)
    return MismatchError(found).with_traceback(error.__traceback__) if found else error


def _run_on(world: Any, state: RunState, unlike: UnlikeCalls) -> None:
    """Let every rank go on: those that wait, and those that have not come so far."""
    last, deadline, logs = unlike.number + CALLS, time.monotonic() + SECONDS, world.calls.logs[unlike.name]

    def post(comm: PointToPoint, kind: str, array: np.ndarray, peer: int, tag: int, nonblocking: bool) -> Request:
        """Complete a message at once."""
        rank = state.running.rank
        if (rank in logs and logs[rank].count > last) or time.monotonic() > deadline:
            raise FiberExit
        if kind == "receive":
            array[...] = np.zeros((), array.dtype)
        request = Request()
        request.comm, request.kind, request.array, request.finished = comm, kind, array, True
        request.peer, request.tag, request.nonblocking = 0 if peer == ANY else peer, tag, nonblocking
        return request

    world.looking_ahead, world.direct = True, False
    world.buffers.watched.clear()
    world.post, world.wait, world.note_request = post, lambda request: None, lambda request: None
    # Whoever waits for a message has it. The ranks of the two calls come first: they say most, if time is short.
    alive = [stream for stream in state.streams() if stream.rank not in state.dead]
    waiting = [stream for stream in alive if isinstance(stream.waiting, Request)]
    waiting.sort(key=lambda stream: stream.rank != state.running.rank)
    for stream in waiting:
        request: Any = stream.waiting
        request.complete, request.waiter = True, None
    state.ready.extend([*waiting, *(stream for stream in unlike.ready if stream not in waiting)])
    while state.ready and time.monotonic() < deadline:
        _resume(world, state, state.ready.popleft())


def _resume(world: Any, state: RunState, stream: Stream) -> None:
    """Let a stream run until it waits for a work, or has ended in any way."""
    state.running, stream.waiting = stream, None
    world.process.give_to(stream.rank)
    world.switches += 1
    try:
        assert stream.fiber is not None
        stream.fiber.switch()
    except BaseException:  # of what the program does with zeros
        return
