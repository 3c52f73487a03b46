"""What a rank sends and receives in a step: receives posted into fresh buffers, sends let go as soon as they have
arrived.

    SEND_F(s, i)   waited for when B(s, i)'s gradient has come back: the activation must have arrived
    SEND_B(s, i)   waited for when a later message from that rank comes, which it sent after using the gradient

Nobody asks whether a message has arrived; the plan says when it must have, so the wait costs nothing and a sent array
does not stay to the end of the step. A connection that skips stages goes straight to the rank that needs it, on a
communicator of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.memory import track
from minidist.base.trace import purpose
from minidist.comm import Comm
from minidist.comm.point_to_point import Request
from minidist.pipeline.plan import Action, Plan
from minidist.pipeline.runtime.shapes import TENSORS, Borders, Key, dtype_of

LARGEST_TAG = 2**14
PURPOSES = {"F": "pipeline_activation", "B": "pipeline_gradient"}
Bound = tuple[str, int, int, int]  # "F" or "B", from stage, to stage, micro-batch; a gradient goes from the later stage


class Messages:
    """One rank's messages of one plan. `ready`: what has arrived or stays on this rank, by (direction, from, to,
    micro-batch).
    """

    def __init__(
        self, comm: Comm, plan: Plan, orders: Sequence[Sequence[Sequence[Action]]], home: Mapping[Key, int]
    ) -> None:
        self.comm, self.skips, self.plan, self.orders, self.home = comm, comm.dup(), plan, orders, home
        self.tags = self._number_messages()
        self.borders = Borders()
        # With several stages on a rank the receiver may be busy with another one for long: then nobody waits before the
        # end.
        self.evaluates = plan.updates == "none" and plan.stages == plan.ranks
        self.begin()

    def begin(self) -> None:
        """A new step: nothing is on its way."""
        self.posted: dict[Bound, list[Request]] = {}
        self.ready: dict[Bound, list[Any]] = {}
        self.sends: dict[Bound, list[Request]] = {}
        self.taken: set[Bound] = set()
        self.last_two: list[Bound] = []

    def know(self, borders: Borders) -> None:
        """Shapes of the borders; with them it is known when each gradient that is sent must have arrived."""
        self.borders = borders
        skipping = any(target > stage + 1 for (stage, _), targets in borders.out.items() for target in targets)
        each = skip_pairs(self.plan.stages) * TENSORS
        if skipping and self.plan.microbatches * each > LARGEST_TAG:
            raise UsageError(
                f"with connections that skip some of {self.plan.stages} stages at most {LARGEST_TAG // each}"
                f" micro-batches fit, not {self.plan.microbatches}; take fewer"
            )
        self.arrived = self._arrivals()

    # --- receiving ---

    def post(self, action: Action) -> None:
        """RECV: post the receives of a border, and of the skips that end at the same stage."""
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind == "RECV_F":
            for source in self.borders.into[stage, i]:
                self._post("F", source, stage, i)
        else:
            for target in self.borders.out[stage, i]:
                self._post("B", target, stage, i)

    def _post(self, direction: str, source: int, stage: int, i: int) -> None:
        bound = (direction, source, stage, i)
        rank = self.home.get((source, i), self.comm.rank)
        if rank == self.comm.rank or bound in self.posted or bound in self.ready:
            return
        metas = self.borders.meta[source, stage, i] if direction == "F" else self.borders.floats((stage, source, i))
        comm, tag = self._channel(direction, source, stage, i)
        with purpose(PURPOSES[direction]):
            buffers = [track(np.empty(shape, dtype_of(dtype)), "communication") for shape, dtype in metas]
            self.posted[bound] = [comm.irecv(fresh, rank, tag + k) for k, fresh in enumerate(buffers)]

    def receive(self, direction: str, stage: int, i: int) -> None:
        """Wait for what an F ("F") or an I or B ("B") of a stage needs."""
        sources = self.borders.into[stage, i] if direction == "F" else self.borders.out[stage, i]
        for source in sources:
            self._post(direction, source, stage, i)  # unless it was: a skip to a stage whose neighbour is on this rank
        for source in sources:
            bound = (direction, source, stage, i)
            requests = self.posted.pop(bound, None)
            if requests is not None:
                self.ready[bound] = [self.comm.wait(request) for request in requests]
            if (
                direction == "B"
            ):  # the gradient has come back, so the activation has arrived: its array need not wait for the step's end
                self._wait(("F", stage, source, i))

    def take(self, direction: str, source: int, stage: int, i: int) -> list[Any]:
        """The arrays that arrived."""
        self.taken.add((direction, source, stage, i))
        return self.ready.pop((direction, source, stage, i))

    def drop(self, direction: str, source: int, stage: int, i: int) -> None:
        """Receive a message that nobody needs, unless it was taken already."""
        bound = (direction, source, stage, i)
        if bound in self.taken:
            return
        self._post(direction, source, stage, i)
        for request in self.posted.pop(bound, []):
            self.comm.wait(request)

    # --- sending ---

    def hand_over(self, direction: str, stage: int, target: int, i: int, arrays: Sequence[Any]) -> None:
        """To a stage on this rank; or into the tray from which SEND takes it; or, past the neighbour, off at once."""
        bound = (direction, stage, target, i)
        self.ready[bound] = [np.ascontiguousarray(array) for array in arrays]
        if abs(target - stage) > 1 and self.home[target, i] != self.comm.rank:
            self._send(bound)

    def send(self, action: Action) -> None:
        """SEND: what lies in the tray."""
        kind, stage, i = action.kind, action.stage, action.microbatch
        self._send((kind[-1], stage, stage + (1 if kind == "SEND_F" else -1), i))

    def _send(self, bound: Bound) -> None:
        direction, stage, target, i = bound
        if (
            self.evaluates
        ):  # no gradient will say that it arrived: two on their way are enough for who takes them in turn
            self.last_two.append(bound)
            if len(self.last_two) > 2:
                self._wait(self.last_two.pop(0))
        comm, tag = self._channel(direction, stage, target, i)
        with purpose(PURPOSES[direction]):
            arrays = self.ready.pop(bound)
            self.sends[bound] = [comm.isend(array, self.home[target, i], tag + k) for k, array in enumerate(arrays)]

    def after(self, item: int) -> None:
        """Item number `item` of the order is done: let go of the gradients that must have arrived by now."""
        for bound in self.arrived.get(item, ()):
            self._wait(bound)

    def finish(self) -> None:
        """Wait for what is left."""
        for bound in list(self.sends):
            self._wait(bound)

    def _wait(self, bound: Bound) -> None:
        self.comm.waitall(self.sends.pop(bound, []))

    # --- before it starts ---

    def _channel(self, direction: str, source: int, target: int, i: int) -> tuple[Comm, int]:
        """Communicator and first tag of a message's tensors."""
        if abs(target - source) == 1:
            return self.comm, self.tags[direction, target, i]
        first, last = min(source, target), max(source, target)
        pair = (
            sum(self.plan.stages - 2 - stage for stage in range(first)) + last - first - 2
        )  # of all that are no neighbours
        return self.skips, (i * skip_pairs(self.plan.stages) + pair) * TENSORS

    def _arrivals(self) -> dict[int, list[Bound]]:
        """Item of this rank's order -> the gradients that have arrived when it is done.

        The gradient of (stage, i) is used by its receiver's B; the first message that this receiver sends here after it
        tells so.
        """
        me, mine = self.comm.rank, _positions(self.orders[self.comm.rank])
        told: dict[
            int, list[int]
        ] = {}  # rank -> for each place in its order, the item here that waits for what it sends later
        places: dict[int, dict[Action, int]] = {}
        result: dict[int, list[Bound]] = {}
        for (stage, i), sources in self.borders.into.items():
            for source in sources:
                rank = self.home.get((source, i), me)
                if rank == me:
                    continue
                if rank not in told:
                    places[rank] = _positions(self.orders[rank])
                    told[rank] = self._told_by(rank, mine)
                used = next(
                    (places[rank][a] for kind in "BI" if (a := Action.of(kind, source, i)) in places[rank]), None
                )
                item = None if used is None else told[rank][used + 1]
                if item is not None and item < len(self.orders[me]):
                    result.setdefault(item, []).append(("B", stage, source, i))
        return result

    def _told_by(self, rank: int, mine: Mapping[Action, int]) -> list[int]:
        order, never = self.orders[rank], len(self.orders[self.comm.rank])
        earliest = [never] * (len(order) + 1)
        for at in range(len(order) - 1, -1, -1):
            earliest[at] = earliest[at + 1]
            for action in order[at]:
                kind, stage, i = action.kind, action.stage, action.microbatch
                if kind in ("SEND_F", "SEND_B"):
                    target = stage + (1 if kind == "SEND_F" else -1)
                    if self.home[target, i] == self.comm.rank:
                        waits = "F" if kind == "SEND_F" else "B" if Action.of("B", target, i) in mine else "I"
                        earliest[at] = min(earliest[at], mine[Action.of(waits, target, i)])
        return earliest

    def _number_messages(self) -> dict[tuple[str, int, int], int]:
        """A tag for each message between two ranks, so that what is posted in one order and sent in another still
        meets.
        """
        tags: dict[tuple[str, int, int], int] = {}
        counts: dict[tuple[int, int], int] = {}
        for (stage, i), rank in sorted(self.home.items()):
            for direction, source in (("F", stage - 1), ("B", stage + 1)):
                if 0 <= source < self.plan.stages and self.home[source, i] != rank:
                    pair = self.home[source, i], rank
                    tags[direction, stage, i] = counts.get(pair, 0) % LARGEST_TAG
                    counts[pair] = counts.get(pair, 0) + TENSORS
        # A stream takes its micro-batches in order at both ends, so a tag may come again: what is older arrives first.
        if max(counts.values(), default=0) > LARGEST_TAG and self.plan.updates in ("flush", "none"):
            raise UsageError(
                f"plan {self.plan.name!r} sends {max(counts.values()) // TENSORS} messages between two ranks, at most"
                " 2,048 fit; take fewer micro-batches"
            )
        return tags


def skip_pairs(stages: int) -> int:
    """Pairs of stages that are no neighbours."""
    return (stages - 1) * (stages - 2) // 2


def _positions(order: Sequence[Sequence[Action]]) -> dict[Action, int]:
    return {action: at for at, item in enumerate(order) for action in item}
