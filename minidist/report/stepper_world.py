"""A simulated world that also keeps what small arrays hold after every message, for the stepper of `stepper.py`.

    post      the arrays that the rank's program has names for are kept from now on; all that are kept are compared
              with what they held: what has changed belongs to the rank's last message
    deliver   one step: the message, the elements that it was sent from, the elements that it was received into

Kept are arrays of at most MAX_ELEMENTS elements. A message from a part of an array is a part of that array: `x[2:4]`
belongs to `x`. Nothing is known of an array before the event at which it is first seen, nor of elements that the
program has only received into, before the message is there.

Proved by: tests/report/test_stepper.py
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from minidist.base.traces import MessageEvent
from minidist.comm import SimWorld
from minidist.comm.call_site import is_of_user
from minidist.comm.sim.watched import Watched
from minidist.core.comm.sim.matching import SimRequest

MAX_ELEMENTS = 64  # of an array whose values are kept
NEVER = sys.maxsize  # a step that does not come


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

    values: step -> what it held after that step; -1 is before the first one. since: of each element, the step after
    which its value is known. touched: the elements that a posted message covers. name: the program's variable.
    """

    array: np.ndarray
    values: dict[int, np.ndarray]
    since: np.ndarray
    touched: np.ndarray
    name: str = ""
    shown: bool = False

    def touch(self, first: int, stop: int, receives: bool) -> None:
        """Note a message from or into these elements; what is received first is known when it is there."""
        if receives:
            self.since[first:stop][~self.touched[first:stop]] = NEVER
        self.touched[first:stop] = True

    def arrive(self, first: int, stop: int, step: int) -> None:
        """Note that a message into these elements has arrived."""
        part = self.since[first:stop]
        if (part == NEVER).any():
            part[part == NEVER] = step
            self.values[step] = self.array.reshape(-1).copy()  # also where nothing has changed

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
        self._last = [-1] * self.state.size  # the last step in which it sent or received
        self._sent: list[list[tuple[int, Place]]] = [[] for _ in range(self.state.size)]  # those after it
        self.on_posted.insert(0, self._keep)

    def _keep(self, request: SimRequest) -> None:
        """Keep what the rank's arrays hold now, before the message meets another one."""
        rank, shown = request.stream.rank, request.kind == "send" or request.comm.operation == "message"
        for name, array in _variables(sys._getframe(1)):
            if (number := self._number(rank, array)) is not None and not self.arrays[rank][number].name:
                self.arrays[rank][number].name = name
        self.note(rank)
        place = self._places[request] = self._place(rank, request.array, shown)
        if place is not None:
            self.arrays[rank][place.number].touch(place.first, place.stop, request.kind == "receive")

    def deliver(self, send: Any, receive: Any) -> None:
        super().deliver(send, receive)
        number = len(self.steps)
        source, target = self._places[send], self._places[receive]
        self.steps.append(Step(send.event, receive.event, source, target))
        if source is not None:
            self._sent[send.stream.rank].append((number, source))
        rank = receive.stream.rank
        self._received[rank] = self._last[rank] = self._last[send.stream.rank] = number
        self._sent[rank].clear()
        self.note(rank)
        if target is not None:
            self.arrays[rank][target.number].arrive(target.first, target.stop, number)

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
        """Return the place of these elements in a kept array; None where the array is not kept."""
        # The array that this one is a part of, if its elements can be counted.
        whole = _whole(array)
        if not (whole.flags.c_contiguous and array.flags.c_contiguous and whole.dtype == array.dtype):
            whole = array
        number = self._number(rank, whole)
        if number is None:
            return None
        kept = self.arrays[rank][number]
        kept.shown |= shown or array.size < whole.size
        first = (array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // whole.itemsize
        return Place(number, first, first + array.size)

    def _number(self, rank: int, whole: np.ndarray) -> int | None:
        """Return the number of an array; a new one gets the next number of its rank, None if it is too large."""
        if not 0 < whole.size <= MAX_ELEMENTS:
            return None
        number = self._numbers[rank].setdefault(id(whole), len(self.arrays[rank]))
        if number == len(self.arrays[rank]):
            # Held, so that no other array gets its id. It may have been made after the rank's last message.
            last, values = self._last[rank], whole.reshape(-1).copy()
            since, touched = np.full(whole.size, last), np.zeros(whole.size, bool)
            self.arrays[rank].append(KeptArray(whole, {-1: values, last: values}, since, touched))
        return number


def _whole(array: np.ndarray) -> np.ndarray:
    """Return the array that this one is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _variables(frame: FrameType | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays that the functions of the user's program in this stack have names for, the innermost first.

    Those that it gives to a function of the library without a name follow with the name "".
    """
    called: FrameType | None = None
    given: dict[str, Any] = {}
    while frame is not None:
        if is_of_user(frame.f_code.co_filename) and frame.f_locals is not frame.f_globals:
            for name, value in frame.f_locals.items():
                # A name of a part is not that of the whole.
                if isinstance(value, np.ndarray) and value.size == (whole := _whole(value)).size:
                    yield name, whole
            given = given or _arguments(called)
        called, frame = frame, frame.f_back
    for value in given.values():
        if isinstance(value, np.ndarray):
            yield "", _whole(value)


def _arguments(frame: FrameType | None) -> dict[str, Any]:
    """Return what a function was called with."""
    if frame is None:
        return {}
    code, values = frame.f_code, frame.f_locals
    return {
        name: values[name] for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name in values
    }


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
