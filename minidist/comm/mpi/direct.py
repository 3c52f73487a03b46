"""Messages without checks and record: a sendrecv is one call of MPI's.

A short message takes about one microsecond in MPI, and four more for what is recorded about it. So a world that records
nothing gives its programs a communicator that makes no requests for a sendrecv:

    all_reduce ──▶ DirectCall.sendrecv ──▶ MPI_Sendrecv        instead of two posts, two waits and what they note

Proved by: tests/comm/test_conformance.py, tests/comm/mpi/test_failures.py
"""

import os
from collections.abc import Sequence
from typing import Any

from minidist.comm.call_site import NOWHERE
from minidist.comm.communicator import CheckedComm
from minidist.comm.message_checks import CheckedCall, CheckedMessages
from minidist.core.base import hooks
from minidist.core.base.arrays import ndarray
from minidist.core.comm.communicator import MAX_TAG


class DirectMessages(CheckedMessages):
    """Messages of an MPIWorld that checks and records nothing."""

    def sendrecv(self, outgoing: ndarray, dest: int, incoming: ndarray, source: int, tag: int | None = None) -> None:
        # Streams go on while a request is waited for, and an array on a GPU is copied.
        world = self.world
        if world.active or outgoing.__class__ is not ndarray or (tag is not None and self.highest_tag != MAX_TAG):
            super().sendrecv(outgoing, dest, incoming, source, tag)
            return

        tag = self.tag if tag is None else tag
        handle, BYTE, ranks = world.handles.get(self.context), world.BYTE, self.ranks
        if handle is None:
            raise world.cannot_be_used(self, NOWHERE)
        to, origin = ranks[dest], ranks[source]
        world.waiting = (self, dest, source, tag, outgoing.nbytes)  # the watchdog makes an Exchanging of it

        # With more ranks than cores a spinning wait keeps the partner from running: test, and yield.
        try:
            if world.oversubscribed:
                requests = [handle.Irecv((incoming, BYTE), origin, tag), handle.Isend((outgoing, BYTE), to, tag)]
                while not world.MPI.Request.Testall(requests):
                    os.sched_yield()
            else:
                handle.Sendrecv((outgoing, BYTE), to, tag, (incoming, BYTE), origin, tag)
        finally:  # a program may catch an error, and go on
            world.waiting = None
        members = self.members
        world.sent[members[dest]] += 1
        world.received[members[source]] += 1


class DirectCall(DirectMessages, CheckedCall):
    """One collective call of a rank."""


class DirectComm(DirectMessages, CheckedComm):
    """A rank's handle on a group of ranks; an all-reduce like the one before is the same object (`last`)."""

    call_class = DirectCall

    def __init__(self, world: Any, origin: str, members: Sequence[int], rank: int, label: str = "") -> None:
        super().__init__(world, origin, tuple(members), rank, label)
        self.last = []
        self.__dict__["ranks"] = tuple(self.ranks)  # an element of a range takes longer to get

    def again(self, array: Any, op: str, algorithm: Any) -> bool:
        """Make the last all-reduce again, with another array and tag; False when this one differs from it."""
        if array.__class__ is not ndarray or not array.flags.carray or algorithm.__class__ is not str:
            return False
        if algorithm in hooks.choosers:
            algorithm = hooks.choosers[algorithm](self, "all_reduce", array.nbytes)
        given, call, run = made = self.last.pop()
        if given != (algorithm, op, array.dtype):
            return False
        call.tag, call.nodes = next(self.numbers) & MAX_TAG, self.nodes
        run(call, array, op)
        self.last.append(made)
        return True
