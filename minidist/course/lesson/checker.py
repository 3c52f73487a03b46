"""Checks an exercise as minidist's own tests check minidist: by properties, on generated cases.

The cases have one rank, numbers of ranks that are not a power of two, sizes that do not divide, empty arrays,
synchronous and buffered sends; some are fixed, and others are drawn by a seed, which is today's date. The fixed ones
run from the smallest on, so the first failure is the smallest counterexample. At the end the function runs under
`mpiexec`, where ranks share nothing: a list that "communicates" for free in one process fails there.

Another process judges: see judge.py.

Proved by: tests/lesson/test_checker.py, tests/lesson/test_exercises.py
"""

import atexit
import os
import sys
from collections.abc import Callable
from datetime import date
from functools import cached_property
from multiprocessing import Pipe
from types import FunctionType
from typing import TYPE_CHECKING, Any

from minidist.base.errors import MinidistError, UsageError, quoted, reason
from minidist.comm import call_site
from minidist.course.lesson import mpi_leg
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.judge import Request, Verdict
from minidist.course.lesson.runner import SEED, Limits, environment, start_main
from minidist.course.lesson.solutions import count
from minidist.course.lesson.transport import Packed, dumps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result(Verdict):
    """A verdict with its picture; true when the answer passed."""

    def __bool__(self) -> bool:
        return self.passed

    @cached_property
    def figure(self) -> "Figure | None":
        """The picture of the counterexample: of messages, of what runs when too much time passes without one, or of
        memory when the peak is above par; None when nothing was recorded.
        """
        metric = self.failure.metric if self.failure else ""
        pictures = [("space-time", "messages"), ("memory", "memory")]
        if metric == "time":
            pictures.insert(1, ("lanes", "spans"))
        for picture, events in pictures[::-1] if metric == "memory" else pictures:
            if any(getattr(trace, events) for trace in self.traces):
                from minidist.report import draw

                return draw(picture, self.traces, {"command": f'minidist.course.lesson.check("{self.name}", ...)'})
        return None


def check(name: str, function: Callable[..., Any], *, mpi: bool = True, seed: int | None = None) -> None:
    """Check `function` as the answer to exercise `name` and print what was found; in a notebook also draw it.

    What the function prints is shown for one run: that of the counterexample, or that of par. mpi=False leaves out the
    leg under mpiexec. seed: draws some of the cases; None takes today's date.
    """
    from minidist.report import show

    try:
        result = examine(name, function, mpi=mpi, seed=seed)
    except UsageError as error:
        print(error)  # a traceback through this file would say nothing more
        return
    if result.failure is None or not result.failure.raised(NotImplementedError):  # which is what a stub raises
        count(result.name, function, result.passed)
    if result.printed:
        print(result.printed, end="" if result.printed.endswith("\n") else "\n")
    print(result.text)
    if result.figure is not None:
        show(result.figure)


def examine(
    name: str, function: Callable[..., Any], *, mpi: bool = True, seed: int | None = None, limits: Limits | None = None
) -> Result:
    """Do what `check` does without printing. limits: of what the answer may use.

    Raises UsageError for an exercise that does not exist, and for a function that is none.
    """
    name = find(name).name
    if not callable(function):
        raise UsageError(f"{name} is answered by a function, not by {quoted(function)}; pass it without calling it")

    # The function goes to another process by value, like the ranks of the leg under mpiexec get it.
    try:
        packed = Packed(dumps(function))
    except Exception as error:  # what pickling the user's objects raises
        problem = f"the function cannot be sent to the process that judges it: {reason(error, named=True)}"
        hint = "make what it uses (a file, a lock, a world) inside the function, or pass it as an argument"
        return Result(name, False, f"{name}: not yet\n  {problem}\n  hint: {hint}", hint)

    launcher = mpi_leg.mpiexec() if mpi else None
    without = "not run, there is no MPI here (pip install 'minidist[mpi]')" if mpi else ""
    seed = seed_of_the_day() if seed is None else seed
    path = tuple(place or os.getcwd() for place in sys.path)
    # Code of the notebook's cells: the judge has the names of their temporary files only.
    functions = (function, *getattr(function, "__globals__", {}).values())
    files = {each.__code__.co_filename for each in functions if isinstance(each, FunctionType)}
    cells = tuple((file, call_site.cell_name(file)) for file in sorted(files) if "ipykernel_" in file)
    request = Request(name, packed, seed, path, launcher, without, limits or Limits(), cells)
    verdict = _session().judge(request)
    return Result(**vars(verdict))


def seed_of_the_day() -> int:
    """Return today's date as a number, such as 20250131, or what MINIDIST_LESSON_SEED says."""
    text = os.environ.get(SEED)
    if text is None:
        return int(date.today().strftime("%Y%m%d"))
    if not text.isdecimal():
        raise UsageError(f"{SEED}={quoted(text)}; it must be a whole number")
    return int(text)


class Session:
    """This process's judge. It runs until this process ends."""

    def __init__(self) -> None:
        self.connection, there = Pipe()
        self.process = start_main("judge", there.fileno(), environment())
        there.close()
        self.owner = os.getpid()

    @property
    def alive(self) -> bool:
        """Whether the judge runs, and belongs to this process: one that was forked has none."""
        return self.owner == os.getpid() and self.process.poll() is None

    def judge(self, request: Request) -> Verdict:
        """Return the judge's verdict. An interrupt ends the judge, and with it the answer that it runs."""
        try:
            self.connection.send(request)
            verdict: Verdict = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            raise MinidistError(
                f"{request.name}: the process that judges ended with exit code {code}; check again"
            ) from None
        except BaseException:
            self.end()
            raise
        return verdict

    def end(self) -> None:
        """End the judge and every process that it has started."""
        if self.alive:
            os.killpg(self.process.pid, 9)
            self.process.wait()


_sessions: list[Session] = []


def _session() -> Session:
    """Return the judge of this process, started now if there is none."""
    if not _sessions or not _sessions[-1].alive:
        _sessions[:] = [Session()]
        atexit.register(_sessions[0].end)
    return _sessions[0]
