"""A thread for the program of a rank. PyTorch keeps state in each thread, which a greenlet would share with others.

The rank itself stays a greenlet of the simulated world. Its program runs in a thread that hands over what is to be
communicated, and waits:

    program (thread)   computes ── call(all_reduce) ──▶ waits ········································· computes
    rank (greenlet)    waits ·························▶ all_reduce(comm, array), as any simulated rank ──▶ waits

Only one of all threads runs at any time, and it changes only where a rank communicates, so that a run is as
deterministic as one of greenlets.

Proved by: tests/torch_ranks/test_rank_thread.py
"""

import io
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.communicator import CheckedComm
from minidist.core.base.errors import UsageError

STACK_BYTES = 64 << 20  # of a rank's thread; backward of a deep model recurses

_of_thread = threading.local()


class RankEnded(BaseException):
    """Raised in a rank's program when the run has ended elsewhere. Not an Exception, so that nothing catches it."""


def current_rank() -> "RankThread":
    """Return the rank to which this thread belongs."""
    rank: RankThread = _of_thread.rank
    return rank


def in_rank() -> bool:
    """Return whether this thread belongs to a rank."""
    return hasattr(_of_thread, "rank")


class RankThread:
    """The program of one rank.

    comm: of all ranks. program: what the thread runs. on_leave, on_return: called in the thread before and after others
    may run, to keep what ranks share apart.
    """

    def __init__(
        self, comm: CheckedComm, program: Callable[[], Any], on_leave: Callable[[], None], on_return: Callable[[], None]
    ) -> None:
        self.comm, self.program, self.on_leave, self.on_return = comm, program, on_leave, on_return
        self._to_program, self._to_rank = threading.Semaphore(0), threading.Semaphore(0)
        self._request: Callable[[], Any] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._result: Any = None
        self._failure: BaseException | None = None
        self.open_works: list[Any] = []  # that the program has begun
        self.groups: list[Any] = []  # process groups that the program has made
        self.races: Any = None  # where its uses of tensors in flight are noted
        self.site = NOWHERE  # the line of the program at which it has communicated last

    def run(self) -> Any:
        """Run the program to its end and return its result. This is what the rank does in its world."""
        size = threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=self._run_program, name=f"rank {self.comm.rank}", daemon=True)
        thread.start()
        threading.stack_size(size)
        world: Any = self.comm.world
        world.programs[self.comm.rank] = thread.ident

        # The program runs until it wants to communicate; the rank does so, and may wait for other ranks meanwhile.
        while True:
            self._to_program.release()
            self._to_rank.acquire()
            if self._ended:
                break
            assert self._request is not None
            try:
                self._answer, self._error = self._request(), None
            except Exception as error:
                self._answer, self._error = None, error
            except BaseException:  # the run has ended elsewhere: the program ends, too
                self._error = RankEnded()
                while not self._ended:
                    self._to_program.release()
                    self._to_rank.acquire()
                raise
        thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result

    def call(self, function: Callable[[], Any]) -> Any:
        """Let the rank run `function` in its world, and return its result. Called in the thread of the program."""
        if isinstance(self._error, RankEnded):
            raise self._error
        if (caller := current_rank()) is not self:  # whose thread would wait for ever
            caller._failure = UsageError(
                f"rank {caller.comm.rank} uses a process group of rank {self.comm.rank} at"
                f" {call_site(sys._getframe(1), NOWHERE)}, which a package that all ranks share has kept; name that"
                " package with --own"
            )
            raise RankEnded  # torch hides an Exception here behind one that it makes of the unknown group
        # Whatever waits when the program has ended has no line of the program on its stack.
        self.site = call_site(sys._getframe(1), self.site)
        # Called from that line, so that reports name the line of the program.
        calls = _calls_at(self.site)
        self._request = lambda: eval(calls, {"function": function})
        self.on_leave()
        self._to_rank.release()
        self._to_program.acquire()
        self.on_return()
        world: Any = self.comm.world
        if world.looking_ahead:  # what the program prints from here on is no result
            sys.stdout = io.StringIO()
        error, answer = self._error, self._answer
        if error is not None:
            raise error
        return answer

    def _run_program(self) -> None:
        _of_thread.rank = self
        self._to_program.acquire()
        try:
            self.on_return()
            self._result = self.program()
        except BaseException as error:
            if not isinstance(error, RankEnded):
                self._failure = error
        finally:
            self.on_leave()
            self._ended = True
            self._to_rank.release()


@cache
def _calls_at(site: CallSite) -> CodeType:
    """Return code that calls `function`, and that belongs to the given line."""
    return compile("\n" * max(0, site.line - 1) + "function()", site.filename, "eval")
