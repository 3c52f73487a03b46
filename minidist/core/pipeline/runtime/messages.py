"""What a rank sends and receives in a step: receives posted into fresh buffers, sends released when they have arrived.

    enqueue   what a stage made, for a stage on this rank or for the SEND that follows
    send      SEND_F(s, i)   released when B(s, i)'s gradient has come back: the activation must have arrived
              SEND_B(s, i)   released behind the item that `released` says, or at the end of the step
    post      RECV: a fresh buffer per message, because the stage keeps it until its backward
    take      what an F, I or B needs, waited for

No rank asks whether a message has arrived; the plan says when it must have, so the wait costs nothing. A skip
connection goes straight to the rank that needs it, on a separate communicator.

Proved by: tests/pipeline/test_messages.py, tests/pipeline/test_runtime.py
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import named_dtype
from minidist.core.base.trace import purpose
from minidist.core.base.watchers import watchers
from minidist.core.comm import Comm
from minidist.core.comm.point_to_point import Request
from minidist.core.pipeline.plan import Action, Plan
from minidist.core.pipeline.runtime.shapes import FLOATS, TENSORS, Key, StageMetadata

MAX_TAG = 2**14
PURPOSES = {"F": "pipeline_activation", "B": "pipeline_gradient"}
# "F" or "B", from stage, to stage, micro-batch; a gradient goes to an earlier stage
Message = tuple[str, int, int, int]
Orders = Sequence[Sequence[Sequence[Action]]]  # of all ranks, items as their actions


class Route(NamedTuple):
    """How a message goes: the communicator, the other rank, the first tag, and each tensor's shape and dtype."""

    comm: Comm
    rank: int
    tag: int
    tensors: list[tuple[tuple[int, ...], np.dtype[Any]]]


class Messages:
    """One rank's messages of one plan. `ready`: what has arrived, stays on this rank or waits for its SEND.

    released: item of this rank's order -> the gradients that have arrived when it is done.
    """

    def __init__(self, comm: Comm, plan: Plan, orders: Orders, rank_of: Mapping[Key, int]) -> None:
        self.comm, self.skips, self.plan, self.orders, self.rank_of = comm, comm.dup(), plan, orders, rank_of
        self.refusals = hooks.pipeline_refusals()
        self.tags = self._number_messages()
        # With several stages on a rank the receiver may be busy with another one for long: no wait before the end then.
        self.evaluates = plan.updates == "none" and plan.stages == plan.ranks
        self.set_shapes(StageMetadata())
        # What is on its way in a step; nothing is at its end.
        self.ready: dict[Message, list[Any]] = {}
        self.posted: dict[Message, list[Request]] = {}
        self.sends: dict[Message, list[Request]] = {}
        self.last_two: list[Message] = []

    def set_shapes(self, metadata: StageMetadata) -> None:
        """Set what will cross this rank's stage boundaries: the buffers, ranks and tags of all messages of a step."""
        self.metadata = metadata
        pairs = (self.plan.stages - 1) * (self.plan.stages - 2) // 2  # of stages that are not neighbours
        self.refusals.check_skips(self, pairs, MAX_TAG // TENSORS)

        # Of every stage and micro-batch: whom it gets from and sends to, and how many tensors cross each boundary.
        self.sources: Mapping[Key, list[int]] = metadata.sources
        self.targets: Mapping[Key, list[int]] = metadata.targets
        self.counts: Mapping[tuple[int, int, int], int] = {way: len(of) for way, of in metadata.tensors.items()}
        # Of what crosses from rank to rank, where it goes.
        self.routes: Mapping[Message, Route] = dict(self._routes(pairs))
        self.released: dict[int, list[Message]] = hooks.arrived_gradients(self)

    def _routes(self, pairs: int) -> Iterator[tuple[Message, Route]]:
        for (source, target, i), tensors in self.metadata.tensors.items():
            if source < 0 or self.rank_of[source, i] == self.rank_of[target, i]:
                continue
            sends = self.rank_of[source, i] == self.comm.rank
            other = self.rank_of[target if sends else source, i]
            shapes = [(shape, named_dtype(dtype)) for shape, dtype in tensors]
            floats = [(shape, dtype) for shape, dtype in shapes if dtype.kind in FLOATS]
            for message, crossing in ((("F", source, target, i), shapes), (("B", target, source, i), floats)):
                if target == source + 1:
                    yield message, Route(self.comm, other, self.tags[message[0], message[2], i], crossing)
                else:
                    pair = sum(self.plan.stages - 2 - stage for stage in range(source)) + target - source - 2
                    yield message, Route(self.skips, other, (i * pairs + pair) * TENSORS, crossing)

    # --- receiving ---

    def post(self, direction: str, stage: int, i: int) -> None:
        """Post the receives of what an F ("F") or an I or B ("B") of a stage needs: its neighbour's and the skips'."""
        for source in (self.sources if direction == "F" else self.targets)[stage, i]:
            message = direction, source, stage, i
            if message not in self.routes or message in self.posted or message in self.ready:
                continue
            comm, rank, tag, tensors = self.routes[message]
            requests = self.posted[message] = []
            with purpose(PURPOSES[direction]):
                for shape, dtype in tensors:
                    buffer = xp.empty(shape, dtype)
                    for watcher in watchers.get():
                        watcher.allocated(buffer, "communication")
                    requests.append(comm.irecv(buffer, rank, tag + len(requests)))

    def wait(self, direction: str, stage: int, i: int) -> None:
        """Wait for what an F ("F") or an I or B ("B") of a stage needs."""
        self.post(direction, stage, i)  # unless it was: a skip to a stage whose neighbour is on this rank
        for source in (self.sources if direction == "F" else self.targets)[stage, i]:
            message = direction, source, stage, i
            if message in self.posted:
                arrays = self.ready[message] = []
                for request in self.posted.pop(message):
                    arrays.append(self.comm.wait(request))
            # The gradient has come back, so the activation has arrived: its array need not wait for the step's end.
            if direction == "B":
                self.comm.waitall(self.sends.pop(("F", stage, source, i), []))

    def take(self, direction: str, stage: int, i: int) -> list[Any]:
        """Wait for what an F, I or B of a stage needs and return the arrays, the neighbour's first."""
        self.wait(direction, stage, i)
        arrays: list[Any] = []
        for source in (self.sources if direction == "F" else self.targets)[stage, i]:
            arrays += self.ready.pop((direction, source, stage, i))
        return arrays

    # --- sending ---

    def enqueue(self, direction: str, stage: int, target: int, i: int, arrays: Sequence[Any]) -> None:
        """Hand what a stage made to `target`: on this rank at once, to a neighbour by its SEND, past it immediately."""
        message = direction, stage, target, i
        ready = self.ready[message] = []
        for array in arrays:
            ready.append(array if array.flags.c_contiguous else array.copy())
        if abs(target - stage) > 1 and message in self.routes:
            self.send(direction, stage, target, i)

    def send(self, direction: str, stage: int, target: int, i: int) -> None:
        """Start to send what was enqueued."""
        message = direction, stage, target, i
        if self.evaluates:  # no gradient will say that it arrived: two on their way keep the receiver busy
            self.last_two.append(message)
            if len(self.last_two) > 2:
                self.comm.waitall(self.sends.pop(self.last_two.pop(0), []))
        comm, rank, tag, _ = self.routes[message]
        requests = self.sends[message] = []
        with purpose(PURPOSES[direction]):
            for array in self.ready.pop(message):
                requests.append(comm.isend(array, rank, tag + len(requests)))

    def finish(self) -> None:
        """Wait for the sends that are left."""
        while self.sends:
            self.comm.waitall(self.sends.pop(next(iter(self.sends))))
        self.last_two.clear()

    # --- before it starts ---

    def _number_messages(self) -> dict[tuple[str, int, int], int]:
        """Return (direction, to stage, micro-batch) -> first tag, distinct per message between two ranks.

        So what is posted in one order and sent in another still meets.
        """
        tags: dict[tuple[str, int, int], int] = {}
        counts: dict[tuple[int, int], int] = {}
        for (stage, i), rank in sorted(self.rank_of.items()):
            for direction, source in (("F", stage - 1), ("B", stage + 1)):
                if 0 <= source < self.plan.stages and self.rank_of[source, i] != rank:
                    pair = self.rank_of[source, i], rank
                    tags[direction, stage, i] = counts.get(pair, 0) % MAX_TAG
                    counts[pair] = counts.get(pair, 0) + TENSORS
        # A stream takes its micro-batches in order at both ends, so a tag may come again: what is older arrives first.
        self.refusals.check_messages(self.plan, max(counts.values(), default=0) // TENSORS, MAX_TAG // TENSORS)
        return tags
