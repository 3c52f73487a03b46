"""What a rank sends and receives in a step: receives posted into fresh buffers, sends released when they have arrived.

    exchange_shapes   stage 0 ──(4, 8) float32──▶ stage 1 ──(4, 6) float32──▶ stage 2    before the first step
    enqueue   what a stage made, for a stage on this rank or for the SEND that follows
    send      SEND_F(s, i)   released when B(s, i)'s gradient has come back: the activation must have arrived
              SEND_B(s, i)   released at the end of the step; with minidist/pipeline/runtime/early_release.py, earlier
    post      RECV: a fresh buffer per message, because the stage keeps it until its backward
    take      what an F, I or B needs, waited for

No rank asks whether a message has arrived; the plan says when it must have, so the wait costs nothing. A receive needs
a buffer of exactly the sender's shape, and the last micro-batch may be smaller than the others: every distinct input
shape goes through the stages once, as zeros and without gradients, before the first step that brings it.

Proved by: tests/pipeline/test_messages.py, tests/pipeline/test_runtime.py
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.trace import purpose, watchers
from minidist.core.comm import Comm, Request
from minidist.core.pipeline.plan import Action, Key, Plan

Tensors = list[tuple[tuple[int, ...], str]]  # shape and dtype of each tensor
Boundaries = Mapping[Key, Tensors]  # (stage, micro-batch) -> what the stage gets from the one before it

FLOATS = "fV"  # kinds of dtypes whose tensors have gradients (bfloat16's is "V"); numbers of tokens have none

TENSORS, DIMS = 8, 8  # at most, that can cross one boundary
# How a message describes one tensor.
ROW = np.dtype([("dtype", "S8"), ("ndim", "i8"), ("shape", "i8", DIMS)])
MESSAGE = TENSORS * ROW.itemsize  # bytes of what is told at a boundary

TAGS = 2**14  # between two ranks: one more than MAX_TAG of communicator.py
PURPOSES = {"F": "pipeline_activation", "B": "pipeline_gradient"}
Message = tuple[str, int, int]  # "F" or "B" for an activation or a gradient, the stage that gets it, micro-batch
Route = tuple[int, int, list[tuple[tuple[int, ...], np.dtype[Any]]]]  # other rank, first tag, shapes and dtypes
Orders = Sequence[Sequence[Sequence[Action]]]  # of all ranks, items as their actions


class Messages:
    """One rank's messages of one plan. `ready`: what has arrived, stays on this rank or waits for its SEND."""

    def __init__(self, comm: Comm, plan: Plan, orders: Orders, rank_of: Mapping[Key, int]) -> None:
        self.comm, self.plan, self.orders, self.rank_of = comm, plan, orders, rank_of
        self.tags = self._number_messages()
        # What is on its way in a step; nothing is at its end.
        self.ready: dict[Message, list[Any]] = {}
        self.posted: dict[Message, list[Request]] = {}
        self.sends: dict[Message, list[Request]] = {}

    def _number_messages(self) -> dict[Message, int]:
        """Return the first tag of each message, by which receives meet sends that are posted in another order."""
        tags: dict[Message, int] = {}
        counts: dict[tuple[int, int], int] = {}
        for (stage, i), rank in sorted(self.rank_of.items()):
            for direction, source in (("F", stage - 1), ("B", stage + 1)):
                if 0 <= source < self.plan.stages and self.rank_of[source, i] != rank:
                    pair = self.rank_of[source, i], rank
                    tags[direction, stage, i] = counts.get(pair, 0) % TAGS
                    counts[pair] = counts.get(pair, 0) + TENSORS
        # A stream takes its micro-batches in order at both ends, so a tag may come again: what is older arrives first.
        most = max(counts.values(), default=0)
        hooks.pipeline_refusals().check_messages(self.plan, most // TENSORS, TAGS // TENSORS)
        return tags

    def exchange_shapes(self, inputs: Sequence[Any], run: Callable[[int, int, list[Any]], list[Any]]) -> Boundaries:
        """Return what crosses the boundaries of this rank's stages.

        run(stage, micro-batch, arrays): a forward pass, which returns the output arrays. Each distinct path through the
        ranks and input shape sends one message of 640 B per boundary between ranks (startup).
        """
        comm, stages = self.comm, self.plan.stages
        # Micro-batches of one path and shape have the same tensors everywhere.
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, value in enumerate(inputs):
            path = tuple(self.rank_of[stage, i] for stage in range(stages))
            groups.setdefault((path, signature(value)), []).append(i)

        boundaries: dict[Key, Tensors] = {}
        # Also what layers send in it: this pass is none of a step.
        with purpose("startup", whole=True):
            for (path, first), members in groups.items():
                # Along the path, rank after rank: run what arrives as zeros, and tell the next stage what leaves.
                tensors: Tensors = [first]
                for stage in (stage for stage in range(stages) if path[stage] == comm.rank):
                    if stage and path[stage - 1] != comm.rank:
                        told = np.empty(MESSAGE // 8, np.int64)
                        comm.recv(told, path[stage - 1])
                        tensors = unpack(told)
                    boundaries.update({(stage, i): tensors for i in members})
                    if stage + 1 == stages:
                        break

                    zeros = [xp.zeros(shape, hooks.named_dtype(dtype)) for shape, dtype in tensors]
                    tensors = [signature(array) for array in run(stage, members[0], zeros)]
                    boundaries.update({(stage + 1, i): tensors for i in members})
                    if path[stage + 1] != comm.rank:
                        comm.send(pack(tensors), path[stage + 1])
        return boundaries

    def know(self, boundaries: Boundaries) -> None:
        """Note what crosses this rank's stage boundaries: the other ranks, tags and buffers of a step's messages."""
        self.routes: Mapping[Message, Route] = {}
        for (stage, i), tensors in boundaries.items():
            message, back = ("F", stage, i), ("B", stage - 1, i)
            if message in self.tags:
                ranks = {self.rank_of[stage - 1, i], self.rank_of[stage, i]}
                (other,) = ranks - {self.comm.rank}
                shapes = [(shape, np.dtype(hooks.named_dtype(dtype))) for shape, dtype in tensors]
                floats = [(shape, dtype) for shape, dtype in shapes if dtype.kind in FLOATS]
                self.routes[message] = other, self.tags[message], shapes
                self.routes[back] = other, self.tags[back], floats

    def post(self, message: Message) -> None:
        """Post the receives of what an F, or an I or B, of a stage needs."""
        rank, tag, tensors = self.routes[message]
        requests = self.posted[message] = []
        with purpose(PURPOSES[message[0]]):
            for shape, dtype in tensors:
                buffer = xp.empty(shape, dtype)
                for watcher in watchers.get():
                    watcher.allocated(buffer, "communication")
                requests.append(self.comm.irecv(buffer, rank, tag + len(requests)))

    def take(self, message: Message) -> list[Any]:
        """Wait for what an F, or an I or B, of a stage needs and return the arrays."""
        if message in self.posted:
            requests = self.posted.pop(message)
            self.comm.waitall(requests)
            arrays = list(map(attrgetter("array"), requests))
        else:
            arrays = self.ready.pop(message)
        # The gradient has come back, so the activation has arrived: its array need not wait for the step's end.
        direction, stage, i = message
        if direction == "B":
            self.comm.waitall(self.sends.pop(("F", stage + 1, i), []))
        return arrays

    def enqueue(self, message: Message, arrays: Sequence[Any]) -> None:
        """Hand what a stage made to the next one: on this rank at once, to another one by its SEND."""
        ready = self.ready[message] = []
        for array in arrays:
            ready.append(array if array.flags.c_contiguous else array.copy())

    def send(self, message: Message) -> None:
        """Start to send what was enqueued."""
        rank, tag, _ = self.routes[message]
        requests = self.sends[message] = []
        with purpose(PURPOSES[message[0]]):
            for array in self.ready.pop(message):
                requests.append(self.comm.isend(array, rank, tag + len(requests)))

    def finish(self) -> None:
        """Wait for the sends that are left."""
        while self.sends:
            self.comm.waitall(self.sends.pop(next(iter(self.sends))))


def signature(value: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array; UsageError for a dtype that cannot be sent."""
    hooks.pipeline_refusals().check_crossing(value)
    return tuple(value.shape), value.dtype.name


def pack(tensors: Tensors) -> np.ndarray:
    """Return shapes and dtypes as numbers that can be sent, 640 B; UsageError for too many."""
    hooks.pipeline_refusals().check_crossings(tensors, TENSORS, DIMS)
    rows = np.zeros(TENSORS, ROW)
    for row, (shape, dtype) in zip(rows, tensors, strict=False):
        row["dtype"], row["ndim"] = dtype, len(shape)
        row["shape"][: len(shape)] = shape
    return rows.view(np.int64)


def unpack(told: np.ndarray) -> Tensors:
    """Return the shapes and dtypes that `pack` has packed."""
    return [(tuple(shape[:ndim]), dtype.decode()) for dtype, ndim, shape in told.view(ROW).tolist() if dtype]
