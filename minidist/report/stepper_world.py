"""A simulated world that also keeps what small arrays hold after every message, for the stepper of `stepper.py`.

    post      the rank's arrays are compared with what they held: what has changed belongs to its last message
    deliver   one step: the message, the elements that it was sent from, the elements that it was received into

Kept are arrays of at most MAX_ELEMENTS elements. A message from a part of an array is a part of that array: `x[2:4]`
belongs to `x`.

Proved by: tests/report/test_stepper.py
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minidist.base.traces import MessageEvent
from minidist.comm import SimWorld
from minidist.comm.sim.watched import Watched
from minidist.core.comm.sim.matching import SimRequest

MAX_ELEMENTS = 64  # of an array whose values are kept


class Place(NamedTuple):
    """Elements first, ..., stop - 1 of the array `number` of a rank."""

    number: int
    first: int
    stop: int


class Step(NamedTuple):
    """One message: its two events, and where it was sent from and received into; None for an array that is not kept."""

    send: MessageEvent
    receive: MessageEvent
    source: Place | None
    target: Place | None


@dataclass
class KeptArray:
    """An array of a rank. shown: whether it is more than the buffer that a collective receives into.

    values: step -> what it held after that step; -1 is before the first one.
    """

    array: np.ndarray
    shown: bool = False
    values: dict[int, np.ndarray] = field(default_factory=dict)

    def changed(self) -> Any:
        """Return which elements are not what they were when the values were last kept."""
        last, now = next(reversed(self.values.values())), self.array.reshape(-1)
        return np.not_equal(now, last) & ~(np.not_equal(now, now) & np.not_equal(last, last))  # NaN stays NaN


class KeepingMatching(Watched):
    """Pairs messages as every simulated world does, and keeps the steps and the arrays."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[Step] = []
        self.arrays: list[list[KeptArray]] = [[] for _ in range(self.state.size)]
        self._numbers: list[dict[int, int]] = [{} for _ in range(self.state.size)]  # id of an array -> its number
        self._places: dict[SimRequest, Place | None] = {}
        self._received = [-1] * self.state.size  # the last step in which each rank received
        self._sent: list[list[tuple[int, Place]]] = [[] for _ in range(self.state.size)]  # those after it
        self.on_posted.insert(0, self._keep)

    def _keep(self, request: SimRequest) -> None:
        """Keep what the rank's arrays hold now, before the message meets another one."""
        rank, shown = request.stream.rank, request.kind == "send" or request.comm.operation == "message"
        self.note(rank)
        self._places[request] = self._place(rank, request.array, shown)

    def deliver(self, send: Any, receive: Any) -> None:
        super().deliver(send, receive)
        number = len(self.steps)
        source, target = self._places[send], self._places[receive]
        self.steps.append(Step(send.event, receive.event, source, target))
        if source is not None:
            self._sent[send.stream.rank].append((number, source))
        self._received[receive.stream.rank] = number
        self._sent[receive.stream.rank].clear()
        self.note(receive.stream.rank)

    def note(self, rank: int) -> None:
        """Keep the rank's arrays where they have changed: a change follows from the last message that it received.

        Elements that it has sent since then changed after that: the message had the old values.
        """
        for number, kept in enumerate(self.arrays[rank]):
            changed = kept.changed()
            if changed.any():
                after = [step for step, p in self._sent[rank] if p.number == number and changed[p.first : p.stop].any()]
                kept.values[max(after, default=self._received[rank])] = kept.array.reshape(-1).copy()

    def _place(self, rank: int, array: np.ndarray, shown: bool) -> Place | None:
        """Return the place of these elements in a numbered array; a new array gets the next number of its rank."""
        # The array that this one is a part of, if its elements can be counted.
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if not (whole.flags.c_contiguous and array.flags.c_contiguous and whole.dtype == array.dtype):
            whole = array
        if not 0 < whole.size <= MAX_ELEMENTS:
            return None

        number = self._numbers[rank].setdefault(id(whole), len(self.arrays[rank]))
        if number == len(self.arrays[rank]):
            # A collective is about to overwrite all of its new buffer, and what uninitialised memory holds differs from
            # run to run.
            if not shown and array.size == whole.size:
                array[...] = 0
            # Held, so that no other array gets its id. What it holds at first, it held before the first step.
            self.arrays[rank].append(KeptArray(whole, values={-1: whole.reshape(-1).copy()}))
        kept = self.arrays[rank][number]
        kept.shown |= shown or array.size < whole.size
        first = (array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // whole.itemsize
        return Place(number, first, first + array.size)


class StepWorld(SimWorld):
    """A simulated world whose runs can be stepped through: `show(world)` of `stepper.py`."""

    matching: KeepingMatching

    def _new_matching(self) -> Watched:
        return KeepingMatching(self.state, self._block, self._watchers())

    def _finish(self) -> None:
        for rank in range(self.size):
            self.matching.note(rank)
        super()._finish()


def step(main: Callable[..., Any], ranks: int = 4, *arguments: Any, **options: Any) -> StepWorld:
    """Run `main(comm, *arguments)` on `ranks` simulated ranks and return the world, for `show`.

    options: of SimWorld. Raises what the run raises: a deadlock as DeadlockError, an exception of a rank as it is.
    """
    world = StepWorld(ranks, **options)
    world.run(main, *arguments)
    return world
