"""An account of the bytes that are alive, by purpose: what a strategy saves is a number here, not a claim.

An account counts each *buffer* once, however many views of it exist, from `track` until the garbage collector frees the
buffer (in CPython: at once, when the last reference goes). The release is charged to the account that was current when
the buffer was tracked, so that simulated ranks, which share a process, never pay for each other. When no account is
set, which is the default, nothing is counted and nothing is paid.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from minidist.base import arrays as xp
from minidist.base.errors import UsageError

MEMORY_PURPOSES = (
    "parameter", "gradient", "optimizer", "activation", "activation_gradient", "communication", "unsharded", "stash",
    "workspace", "input",
)  # fmt: skip


class MemoryAccount:
    """Live and peak bytes of one rank.

    `current` and `peak` are totals in bytes; `by_purpose` and `peak_by_purpose` split them (the peak of each purpose is
    its own, so they need not add up to `peak`); `at_peak` is the split at the moment of the total peak. With
    `timeline=True`, `events` is a list of (purpose, bytes), positive at birth and negative at death.
    """

    def __init__(self, timeline: bool = False) -> None:
        self.current = 0
        self.peak = 0
        self.by_purpose: dict[str, int] = {}
        self.peak_by_purpose: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.events: list[tuple[str, int]] | None = [] if timeline else None
        self._live: dict[int, str] = {}

    def track(self, array: xp.Array, purpose: str) -> xp.Array:
        """Count the buffer behind `array` under `purpose`, once, until it is freed. Returns `array`."""
        if purpose not in MEMORY_PURPOSES:
            raise ValueError(f"unknown memory purpose {purpose!r}; one of {', '.join(MEMORY_PURPOSES)}")
        if not xp.is_array(array):
            return array  # a NumPy scalar, which arithmetic on arrays of shape () gives
        buffer = xp.owner(array)
        if id(buffer) not in self._live and buffer.nbytes > 0:
            self._live[id(buffer)] = purpose
            weakref.finalize(buffer, self._release, id(buffer), buffer.nbytes).atexit = False
            self._change(purpose, buffer.nbytes)
        return array

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

    def _release(self, key: int, nbytes: int) -> None:
        self._change(self._live.pop(key), -nbytes)

    def _change(self, purpose: str, nbytes: int) -> None:
        self.current += nbytes
        live = self.by_purpose[purpose] = self.by_purpose.get(purpose, 0) + nbytes
        if live > self.peak_by_purpose.get(purpose, 0):
            self.peak_by_purpose[purpose] = live
        if self.current > self.peak:
            self.peak = self.current
            self.at_peak = dict(self.by_purpose)
        if self.events is not None:
            self.events.append((purpose, nbytes))


memory_account: ContextVar[MemoryAccount | None] = ContextVar("minidist_memory_account", default=None)


def track(array: xp.Array, purpose: str) -> xp.Array:
    """Count `array` in the current account, if there is one. Returns `array`."""
    account = memory_account.get()
    return array if account is None else account.track(array, purpose)


@contextmanager
def account_memory(timeline: bool = False) -> Iterator[MemoryAccount]:
    """Set a new account for the block and hand it over."""
    account = MemoryAccount(timeline)
    token = memory_account.set(account)
    try:
        yield account
    finally:
        memory_account.reset(token)
