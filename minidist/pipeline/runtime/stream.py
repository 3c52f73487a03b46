"""A stream of micro-batches through an asynchronous pipeline, a step at a time, in memory that does not grow with it.

    order of rank 0 (p = 3)   F0 F1 | F2 B0 | F3 B1 | F4 B2 | F5 B3 | ...         the same actions in every period, for
    step                      0             | 1     | 2     | 3     |              micro-batches one period later

The plan of a `Pipeline` names every action. That of a stream need not: after the warm-up a rank's order repeats, so a
plan of `plan_length` micro-batches gives the order of any number of them. An action of micro-batch i looks up what the
plan knows (ranks, tags, shapes) at i modulo the period, the number of different paths through the ranks.

A step ends on a rank when its backward passes of the step's micro-batches are done and their gradients are sent. Then
the rank makes the updates of the rounds that end here, and gets the losses from the last stage, which has had them for
as long as the gradients took. Ahead of the step, the rank has run the forward passes that keep the pipeline full.

Source: PipeDream's runtime drains at the end of an epoch; here a stream ends where its caller says.

Proved by: tests/pipeline/test_stream.py, tests/train/test_asynchronous.py
"""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.trace import purpose
from minidist.comm.point_to_point import Request
from minidist.pipeline.plan import Action
from minidist.pipeline.plan.action import COMPUTE
from minidist.pipeline.runtime.pipeline import Item, Pipeline, Step
from minidist.pipeline.runtime.shapes import MicroBatches


def plan_length(ranks: int, period: int) -> int:
    """Return how many micro-batches a plan needs so that every rank's order repeats in it."""
    return _cut(ranks, period) + 3 * period + 2 * ranks


def _cut(ranks: int, period: int) -> int:
    """Return the micro-batch before whose backward every rank's warm-up is over, a multiple of the period."""
    return -(-(ranks + 1) // period) * period


class Stream:
    """Runs a pipeline's order step by step, and beyond the end of its plan.

        stream = Stream(Pipeline(comm, plan, stages, loss, versions=versions, period=1))
        stream.begin(inputs, targets, 1000)
        for _ in range(1000):
            losses = stream.advance()        # one step: its micro-batches, and the updates that they end

    pipe: of a plan of at least `plan_length` micro-batches, with versions and a period. size: micro-batches of a step.
    count, done: micro-batches of the stream, and those of the steps made. After the last step nothing is on its way,
    every rank has the latest weights, and `begin` may begin another stream.

    Sends what `Pipeline` and `WeightVersions` send, and each micro-batch's loss (8 B, purpose metrics) from the rank of
    its last stage to every other. Raises UsageError for a pipeline without versions or period, for a plan that is too
    short, and for calls at the wrong time.
    """

    def __init__(self, pipe: Pipeline, size: int = 1) -> None:
        if pipe.versions is None or pipe.messages.is_whole:
            raise UsageError("a Stream needs a Pipeline with versions=WeightVersions(...) and period=...")
        needed = plan_length(pipe.plan.ranks, pipe.messages.period)
        if pipe.plan.microbatches < needed:
            raise UsageError(
                f"plan {pipe.plan.name!r} has {pipe.plan.microbatches} micro-batches, too few to show how its order"
                f" repeats; make it with at least {needed} (plan_length)"
            )
        self.pipe, self.versions, self.size, self.period = pipe, pipe.versions, size, pipe.messages.period
        self.comm = pipe.comm.dup()  # of losses
        self.warm_up: list[Item] = []
        self.repeated: list[Item] = []
        self.count = self.done = 0
        self.sends: deque[tuple[int, list[Request]]] = deque()  # (micro-batch, losses from it on that are on their way)

        # This rank's micro-batches: its first one, and every k-th after it.
        own = sorted({i for item in pipe.order for kind, _, i, _ in item if kind == "F"})
        self.turn, self.stride = own[0], own[1] - own[0]

    def begin(self, inputs: MicroBatches, targets: MicroBatches, count: int) -> None:
        """Begin a stream of `count` micro-batches, a multiple of `size`.

        inputs, targets: of as many micro-batches as the plan has, which are read beyond them.
        """
        if self.done < self.count:
            raise UsageError(
                f"rank {self.comm.rank}: a stream begins when the one before it has made all its {self.count}"
                f" micro-batches, and that has made {self.done}; call advance() until then"
            )
        if count < 1 or count % self.size:
            raise UsageError(
                f"a stream of {count} micro-batches does not divide into steps of {self.size}; give it a multiple of"
                f" {self.size}"
            )
        self.pipe.begin(inputs, targets)
        self.versions.begin(count)
        # What is released when follows from the shapes, which are known from the first stream on.
        if not self.repeated:
            self.warm_up, self.repeated = self._parts()
        self.count, self.done, self.backward = count, 0, self.turn
        self.items = self._endless()
        self.following = next(self.items, None)

    def advance(self) -> list[float]:
        """Run the next step on this rank and return its losses. Every rank calls it."""
        if self.done == self.count:
            raise UsageError(
                f"rank {self.comm.rank}: the stream has made all its {self.count} micro-batches; begin another one"
            )
        first, last = self.done, self.done + self.size - 1
        self._run_through(last)
        losses = self._send_losses(first, last)

        # The updates, and after the last step what is still on its way.
        self.versions.end_step(last)
        if last + 1 == self.count:
            self.pipe.messages.finish()
            self.versions.settle()
        if losses is None:
            losses = np.empty(self.size)
            with purpose("metrics"):
                self.comm.recv(losses, self._rank_of_losses(first))
        self.done = last + 1
        if self.done == self.count:
            self._wait_for_losses(self.count)
        return losses.tolist()  # type: ignore[no-any-return]

    # --- the order ----------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[list[Item], list[Item]]:
        """Return the items of the warm-up, and those of one period that repeat after it."""
        items = self.pipe.items
        cut = _cut(self.pipe.plan.ranks, self.period)
        # The place behind this rank's last backward below the cut, and one and two periods later.
        last = range(self.turn, cut, self.stride)[-1]
        places = {i: at + 1 for at, (actions, _) in enumerate(items) for kind, _, i, _ in actions if kind == "B"}
        a, b, c = (places[last + n * self.period] for n in range(3))
        repeated = items[a:b]
        assert [_later(item, self.period) for item in repeated] == items[b:c], "the order does not repeat"
        return items[:a], repeated

    def _endless(self) -> Iterator[Item]:
        """Yield this rank's items of the stream."""
        yield from (item for item in self.warm_up if self._is_inside(item))
        for number in itertools.count():
            found = [_later(item, number * self.period) for item in self.repeated]
            inside = [item for item in found if self._is_inside(item)]
            if not inside:
                return
            yield from inside

    def _is_inside(self, item: Item) -> bool:
        """Return whether an item's micro-batch belongs to the stream."""
        return all(i < self.count for _, _, i, _ in item[0])

    def _run_through(self, last: int) -> None:
        """Run the order up to this rank's last backward of micro-batches up to `last`, and the transfers behind it."""
        while self.following is not None:
            kind = self.following[0][0].kind
            if self.backward > last and kind in COMPUTE:
                return
            self.pipe.execute([self.following])
            if kind == "B":
                self.backward += self.stride
            self.following = next(self.items, None)

    # --- the losses ---------------------------------------------------------------------------------------------------

    def _rank_of_losses(self, i: int) -> int:
        return self.pipe.messages.rank_of[self.pipe.plan.stages - 1, i % self.period]

    def _send_losses(self, first: int, last: int) -> Any:
        """Send the losses of a step to all ranks, on the rank that has them; returns them, or None elsewhere."""
        if self._rank_of_losses(first) != self.comm.rank:
            return None
        losses = self.pipe.losses.take(range(first, last + 1), mode="wrap")
        with purpose("metrics"):
            requests = [self.comm.isend(losses, rank, 0) for rank in range(self.comm.size) if rank != self.comm.rank]
        # Every rank has passed the steps that are so long ago: the forwards behind them have arrived here.
        self._wait_for_losses(first - 2 * self.comm.size * self.size)
        self.sends.append((first, requests))
        return losses

    def _wait_for_losses(self, before: int) -> None:
        while self.sends and self.sends[0][0] < before:
            self.comm.waitall(self.sends.popleft()[1])


def _later(item: Item, by: int) -> Item:
    """Return the same item for micro-batches `by` later."""
    actions, released = item
    return (
        [Step(kind, stage, i + by, str(Action.of(kind, stage, i + by))) for kind, stage, i, _ in actions],
        [(direction, source, target, i + by) for direction, source, target, i in released],
    )
