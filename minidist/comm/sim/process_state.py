"""What belongs to the process and must not be shared by simulated ranks: random generators and asyncio's running loop.

`np.random.rand()` and `random.random()` draw from generators of the process, so simulated ranks would draw from each
other's numbers. All ranks begin with the state that the process has when the run begins. As long as nothing draws,
nothing is kept, and a switch between ranks compares a few words of the generators in place:

    rank 0  ── draws ──▶ switch: a word has changed      keep rank 0's state, put back the state of the beginning
    rank 1  ── draws ──▶ switch                          from now on each switch keeps one state and puts back another

After the run the process has the state of rank 0. asyncio notes which event loop runs in a thread; a rank that waits
for a message inside `asyncio.run` would leave its loop to the next rank.

Proved by: tests/comm/sim/test_process_state.py
"""

import ctypes
import os
import random
import sys
import warnings
from operator import attrgetter
from typing import Any

import numpy as np


class ProcessState:
    """The state of the process for every rank of a run. `give_to(rank)` is called when another rank has run."""

    words_now = attrgetter("drawn.value", "seed.value", "numpy.value")
    _last: tuple[Any, Any] = (None, None)  # the words and states at the beginning of the last run

    def __init__(self) -> None:
        self.owner = 0  # whose state the process has
        self.kept: dict[int, Any] = {}
        self.loops: dict[int, Any] = {}
        self.folder = folder_now()
        self.asyncio: Any = sys.modules.get("asyncio")  # where the program has imported it
        words = _words()
        self.drawn, self.seed, self.numpy = words or (ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64())
        # None, None, None once a rank has drawn: then every switch keeps the state.
        self.words: Any = self.words_now(self)
        # Reading the states takes as long as a short run, and nothing has drawn where the words are the same.
        if words is None or self.words != self._last[0]:
            type(self)._last = self.words, random_states()
        self.beginning = self._last[1]
        # A normal deviate that waits to be drawn changes no word when it is.
        if words is None or self.beginning[0][2] is not None or bool(self.beginning[1]["has_gauss"]):
            self.words, type(self)._last = (None, None, None), (None, None)

    def give_to(self, rank: int) -> None:
        """Let the process have the state of a rank."""
        if self.asyncio is not None:
            self._switch_loops(rank)
        before, self.owner = self.owner, rank
        if self.words == self.words_now(self):
            return
        self.words = None, None, None
        self.kept[before] = random_states()
        set_random_states(self.kept.get(rank, self.beginning))

    def _switch_loops(self, rank: int) -> None:
        events = self.asyncio.events
        running = events._get_running_loop()
        if running is not None or rank in self.loops:
            self.loops[self.owner] = running
            events._set_running_loop(self.loops.pop(rank, None))

    def returned(self, rank: int, size: int) -> None:
        """Warn when a rank of several has changed the working directory, which belongs to all of them."""
        if size > 1 and self.folder and (folder := folder_now()) != self.folder:
            warnings.warn(
                f"rank {rank} has changed the working directory from {self.folder!r} to {folder!r}; simulated ranks"
                " share it, and processes of mpiexec have one each: use whole paths instead of os.chdir",
                stacklevel=2,
            )
            self.folder = ""  # said once

    def end(self) -> None:
        """Let the process have the state of rank 0: called after the run."""
        if self.owner != 0:
            self.give_to(0)


def folder_now() -> str:
    """Return the working directory; "" when it has been removed."""
    try:  # each rank asks
        return os.getcwd()
    except OSError:
        return ""


def random_states() -> tuple[Any, Any]:
    """Return the states of the generators of Python and of NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002


def set_random_states(states: tuple[Any, Any]) -> None:
    """Give the generators other states."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


def _words() -> tuple[ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64] | None:
    """Return words of the generators; each draw and seed changes one of them; None where they cannot be read in place.

    A draw counts a number up, and after 624 computes all others anew. Python's seed sets that number to 624 and the
    first of the others to a constant: where nothing was drawn before the seed, it changes only the words after them.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if sys.implementation.name != "cpython" or type(generator) is not np.random.MT19937:
        return None
    python = id(random._inst) + object.__basicsize__
    places = python, python + 623 * 4, generator.ctypes.state_address + 623 * 4
    drawn, seed, numpy = map(ctypes.c_uint64.from_address, places)
    return drawn, seed, numpy
