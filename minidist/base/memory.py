"""Count the bytes that are alive, by purpose, so that what a strategy saves is a measured number.

An account counts each *buffer* once, however many views of it exist, from `track` until the garbage collector frees the
buffer (in CPython: at once, when the last reference goes). The release is charged to the account that was current when
the buffer was tracked, so that simulated ranks, which share a process, never pay for each other. When no account is
set, which is the default, nothing is counted and nothing is paid.

Proved by: tests/base/test_memory.py, tests/train/test_memory_over_steps.py
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.watchers import Watcher
from minidist.core.base import arrays as xp

MEMORY_PURPOSES = (
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "activation_gradient",
    "communication",
    "unsharded",
    "stash",
    "workspace",
    "input",
)
_KNOWN = frozenset(MEMORY_PURPOSES)
Sample = tuple[float, dict[str, int]]  # seconds, and live bytes by purpose


class _Buffer(weakref.ref):  # type: ignore[type-arg]
    """Tells the account when a buffer is gone. (`weakref.finalize` does the same at three times the price.)"""

    __slots__ = ("key", "nbytes", "purpose")
    key: int
    nbytes: int
    purpose: str


class MemoryAccount(Watcher):
    """Live and peak bytes of one rank.

    `current` and `peak` are totals in bytes; `by_purpose` and `peak_by_purpose` split them (the peak of each purpose is
    its own, so they need not add up to `peak`); `at_peak` is the split at the moment of the total peak. With
    `timeline=True`, `events` is a list of (purpose, bytes), positive at birth and negative at death; with a `clock`, a
    function that returns seconds, `samples()` says when. `stop()` ends the list (not the count).
    """

    def __init__(self, timeline: bool = False, clock: Callable[[], float] | None = None) -> None:
        self.current = 0
        self.peak = 0
        self.by_purpose: dict[str, int] = {}
        self.peak_by_purpose: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.events: list[tuple[str, int]] | None = [] if timeline or clock else None
        self.recording = self.events is not None
        self._clock = clock
        self._until: float | None = None
        self._times: list[float] = []
        self._live: dict[int, _Buffer] = {}

    def track(self, array: xp.Array, purpose: str) -> xp.Array:
        """Count the buffer behind `array` under `purpose`, once, until it is freed. Returns `array`."""
        if purpose not in _KNOWN:
            raise ValueError(f"unknown memory purpose {quoted(purpose)}; one of {', '.join(MEMORY_PURPOSES)}")
        if isinstance(array, xp.generic):
            return array  # a NumPy scalar, which arithmetic on arrays of shape () gives
        buffer = array if getattr(array, "base", None) is None else xp.owner(array)
        key, nbytes = id(buffer), buffer.nbytes
        if key not in self._live and nbytes:
            self.remember(buffer, purpose)
            self.change(purpose, nbytes)
        return array

    allocated = track  # of an array that is not an operation's result

    def remember(self, buffer: xp.Array, purpose: str) -> None:
        """Count the release of a buffer whose allocation has been counted."""
        reference = self._live[id(buffer)] = _Buffer(buffer, self._release)
        reference.key, reference.nbytes, reference.purpose = id(buffer), buffer.nbytes, purpose

    def buffers(self) -> dict[int, _Buffer]:
        """Return the buffers that are alive, by the id of the array that owns the memory."""
        return self._live.copy()

    def forget(self, buffer: xp.Array) -> None:
        """Do not count the release of a buffer: it is counted in another way."""
        self._live.pop(id(buffer), None)

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[xp.Array]) -> None:
        """Count an operation's result, and what its node saves in addition to inputs and result."""
        self.track(out.data, "activation")
        if out.node is not None:
            for array in saved:
                self.track(array, "activation")

    def input_gradient(self, gradient: xp.Array, cost: tuple[int, int] | None) -> None:
        """Count the gradient of an activation."""
        self.track(gradient, "activation_gradient")

    def begin_peak(self) -> tuple[int, dict[str, int]]:
        """Begin a new peak, at what is alive now; return the one so far and its split by purpose."""
        before = self.peak, self.at_peak
        self.peak, self.at_peak = self.current, self.by_purpose.copy()
        return before

    def history(self) -> list[dict[str, int]]:
        """Live bytes by purpose after each event, for `Trace.memory`. Needs timeline=True."""
        if self.events is None:
            raise UsageError("the account kept no events; make it with timeline=True")
        live: dict[str, int] = {}
        result = []
        for purpose, change in self.events:
            live = {**live, purpose: live.get(purpose, 0) + change}
            result.append(live)
        return result

    def stop(self) -> None:
        """Record no more events."""
        self.recording, self._until = False, None if self._clock is None else self._clock()

    def samples(self) -> list[Sample]:
        """(seconds, live bytes by purpose) after each event, for `Trace.memory`. Needs a clock.

        A virtual clock stands still while Python computes, and then jumps: the events between two of its readings are
        spread evenly over the jump, so that their order and the direction of every change can be seen.
        """
        if self._clock is None:
            raise UsageError("the account kept no times; make it with clock=comm.time")
        times, count = self._times, len(self._times)
        spread: list[float] = []
        while len(spread) < count:
            first = len(spread)
            stop = next((i for i in range(first, count) if times[i] > times[first]), count)
            end = (
                times[stop]
                if stop < count
                else max(times[first], self._clock() if self._until is None else self._until)
            )
            spread += [times[first] + (end - times[first]) * i / (stop - first) for i in range(stop - first)]
        return list(zip(spread, self.history(), strict=True))

    def _release(self, reference: "_Buffer") -> None:
        del self._live[reference.key]
        self.change(reference.purpose, -reference.nbytes)

    def change(self, purpose: str, nbytes: int) -> None:
        """Count bytes that are allocated, or released where the number is negative."""
        self.current += nbytes
        live = self.by_purpose[purpose] = self.by_purpose.get(purpose, 0) + nbytes
        if nbytes > 0:
            if live > self.peak_by_purpose.get(purpose, 0):
                self.peak_by_purpose[purpose] = live
            if self.current > self.peak:
                self.peak = self.current
                self.at_peak = self.by_purpose.copy()
        if self.recording:
            self.events.append((purpose, nbytes))  # type: ignore[union-attr]
            if self._clock is not None:
                now = self._clock()
                self._times.append(max(now, self._times[-1]) if self._times else now)


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Return at most `most` samples: of equally many neighbours the one with the most bytes, so that the peak stays."""
    size = max(1, -(-len(samples) // most))
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [max(group, key=lambda sample: sum(sample[1].values())) for group in groups]


account_memory = MemoryAccount  # `with account_memory() as account` counts in a new account in the block
