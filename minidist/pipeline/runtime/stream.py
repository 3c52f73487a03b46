"""A stream of micro-batches through an asynchronous pipeline, a step at a time, in memory that does not grow with it.

    order of rank 0 (p = 3)   F0 F1 | F2 B0 | F3 B1 | F4 B2 | F5 B3 | ...         the same actions in every period, for
    step                      0             | 1     | 2     | 3     |              micro-batches one period later

The plan of a `VersionedPipeline` names every action. That of a stream need not: after the warm-up a rank's order
repeats, so a plan of `plan_length` micro-batches gives the order of any number of them. An action of micro-batch i
looks up what the plan knows (ranks, tags, shapes) at i modulo the period, the number of different paths through the
ranks.

A step ends on a rank when its backward passes of the step's micro-batches are done and their gradients are sent. Then
the rank makes the updates of the rounds that end here, and gets the losses from the last stage, which has had them for
as long as the gradients took. Ahead of the step, the rank has run the forward passes that keep the pipeline full, and a
replica what it can of its round: replicas compute at the same time, as in the full plan. What a rank runs in a step
waits for nothing that another runs in a later one, so ranks may communicate between two steps.

Source: PipeDream's runtime drains at the end of an epoch; here a stream ends where its caller says.

Proved by: tests/pipeline/test_stream.py, tests/train/test_asynchronous.py
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.comm.communicator import Request
from minidist.core.pipeline.plan import COMPUTE, Action, Plan, actions_of
from minidist.core.pipeline.plan import Item as ItemOfPlan
from minidist.core.pipeline.runtime.pipeline import Step
from minidist.pipeline.runtime.pipeline import Item
from minidist.pipeline.runtime.versioned import MicroBatches, VersionedPipeline
from minidist.pipeline.simulate import Dependencies, Simulation


def plan_length(ranks: int, period: int) -> int:
    """Return how many micro-batches a plan needs so that every rank's order repeats in it."""
    return _cut(ranks, period) + 3 * period + 2 * ranks


def _cut(ranks: int, period: int) -> int:
    """Return the micro-batch before whose backward every rank's warm-up is over, a multiple of the period."""
    return -(-(ranks + 1) // period) * period


class Stream:
    """Runs a pipeline's order step by step, and beyond the end of its plan.

        stream = Stream(VersionedPipeline(comm, plan, stages, loss, versions=versions, period=1))
        stream.begin(inputs, targets, 1000)
        for _ in range(1000):
            losses = stream.advance()        # one step: its micro-batches, and the updates that they end

    pipe: of a plan of at least `plan_length` micro-batches, with versions and a period. size: micro-batches of a step,
    which divide the period.
    count, done: micro-batches of the stream, and those of the steps made. After the last step nothing is on its way,
    every rank has the latest weights, and `begin` may begin another stream.

    Sends what `VersionedPipeline` and `WeightVersions` send, and each micro-batch's loss (8 B, purpose metrics) from
    the rank of its last stage to every other. Raises UsageError for a pipeline without versions or period, for a plan
    that is too short, and for calls at the wrong time.
    """

    def __init__(self, pipe: VersionedPipeline, size: int = 1) -> None:
        if not isinstance(pipe, VersionedPipeline) or pipe.period is None:
            raise UsageError("a Stream needs a VersionedPipeline with versions=WeightVersions(...) and period=...")
        needed = plan_length(pipe.plan.ranks, pipe.period)
        if pipe.plan.microbatches < needed:
            raise UsageError(
                f"plan {pipe.plan.name!r} has {pipe.plan.microbatches} micro-batches, too few to show how its order"
                f" repeats; make it with at least {needed} (plan_length)"
            )
        if pipe.period % size:
            raise UsageError(
                f"a period of {pipe.period} micro-batches does not divide into steps of {size}; give the"
                f" Pipeline a period that is a multiple of {size}"
            )
        self.pipe, self.versions, self.size, self.period = pipe, pipe.versions, size, pipe.period
        self.comm = pipe.comm.dup()  # of losses
        self.warm_up: list[Item] = []
        self.repeated: list[Item] = []
        self.ends: list[int] = []
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
            plan = self.pipe.plan.with_orders(tuple(tuple(order) for order in self.pipe.plan.orders))
            self.ends = _ends_of_steps(plan, self.size, self.period)[self.pipe.comm.rank]
        self.count, self.done = count, 0
        self.items = self._endless()
        self.following = next(self.items, None)

    def advance(self) -> list[float]:
        """Run the next step on this rank and return its losses. Every rank calls it."""
        if self.done == self.count:
            raise UsageError(
                f"rank {self.comm.rank}: the stream has made all its {self.count} micro-batches; begin another one"
            )
        first, last = self.done, self.done + self.size - 1
        end = self._end_of(first // self.size)
        while self.following is not None and self.following[0] < end:
            self.pipe.execute([self.following[1]])
            self.following = next(self.items, None)
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
        places = {i: at + 1 for at, item in enumerate(items) for kind, _, i, _ in item if kind == "B"}
        a, b, c = (places[last + n * self.period] for n in range(3))
        repeated = items[a:b]
        later = [_later(item, self.period) for item in repeated]
        same = [(item, item.arrived) for item in later] == [(item, item.arrived) for item in items[b:c]]
        assert same, "the order does not repeat"
        return items[:a], repeated

    def _endless(self) -> Iterator[tuple[int, Item]]:
        """Yield this rank's items of the stream, each with its place in the order of an endless one."""
        at = 0
        for item in self.warm_up:
            if self._is_inside(item):
                yield at, item
            at += 1
        for number in itertools.count():
            inside = False
            for item in self.repeated:
                later = _later(item, number * self.period)
                if self._is_inside(later):
                    inside = True
                    yield at, later
                at += 1
            if not inside:
                return

    def _is_inside(self, item: Item) -> bool:
        """Return whether an item's micro-batch belongs to the stream."""
        return all(i < self.count for _, _, i, _ in item)

    def _end_of(self, step: int) -> float:
        """Return the place in the endless order at which a step ends; the last one runs all that is left."""
        if (step + 1) * self.size == self.count:
            return math.inf
        per_period = self.period // self.size
        periods = max(0, -(-(step + 1 - len(self.ends)) // per_period))
        return self.ends[step - periods * per_period] + periods * len(self.repeated)

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


@lru_cache(maxsize=4)
def _ends_of_steps(plan: Plan, size: int, period: int) -> list[list[int]]:
    """Return the places in each rank's order at which its steps end, of the steps until these repeat with the order.

    A simulation runs each step as far as it goes: up to the update that the step's end makes, or to what another rank
    runs in a later step. All ranks of a simulated world have the same plan, whose orders are tuples here.
    """
    # By rank and place: the first step in which the item may run, after the updates that its weights need.
    replicas = {stage: len(ranks) for stage, ranks in plan.holders().items()}
    gates: list[list[int]] = [[] for _ in plan.orders]
    for order, row in zip(plan.orders, gates, strict=True):
        finished = 0
        for action in (actions_of(item)[0] for item in order):
            row.append(finished * replicas[action.stage] // size if action.kind in COMPUTE else 0)
            finished += action.kind == "B"

    # A send does not stop a rank here, and follows what it sends.
    needs = Dependencies(plan).needs
    orders: list[list[ItemOfPlan]] = [[] for _ in plan.orders]
    simulation = Simulation(orders, lambda action: [] if action.kind.startswith("SEND") else needs(action))
    ends: list[list[int]] = [[] for _ in plan.orders]
    for step in range((_cut(plan.ranks, period) + period) // size):
        for rank, row in enumerate(gates):
            stop = next((at for at, gate in enumerate(row) if gate > step), len(row))
            orders[rank] += plan.orders[rank][len(orders[rank]) : stop]
        simulation.run()
        for rank, at in enumerate(simulation.position):
            ends[rank].append(at)
    return ends


def _later(item: Item, by: int) -> Item:
    """Return the same item for micro-batches `by` later."""
    return Item(
        [Step(kind, stage, i + by, str(Action.of(kind, stage, i + by))) for kind, stage, i, _ in item],
        [(direction, stage, i + by) for direction, stage, i in item.arrived],
    )
