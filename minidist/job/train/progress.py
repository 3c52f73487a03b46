"""Progress of a job: a bar on a terminal, and elsewhere lines; of other work, the seconds so far.

The time between two lines doubles from 2 to 32 seconds, so that a log has few. A bar drawn with carriage returns
reaches the screen only at the end under some launchers; lines arrive at once. One rank prints.

Proved by: tests/commands/test_cli.py
"""

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from minidist.job.train.state import StepState

SECONDS_BETWEEN_LINES = 2.0
MOST_SECONDS_BETWEEN_LINES = 32.0


class Progress:
    """Shows the step and the loss; an observer of training, and a context manager around it.

    ends: also print the lines of the first and the last step, however short the job is.
    """

    reads_tensors = False

    def __init__(self, steps: int, interactive: bool, title: str = "training", ends: bool = True) -> None:
        self.steps, self.interactive, self.title, self.ends = steps, interactive, title, ends
        self.done = 0
        self.bar: Any = None
        self.task: Any = None
        self.last = time.monotonic()
        self.wait = SECONDS_BETWEEN_LINES

    def __enter__(self) -> Self:
        if self.interactive:
            # Imported where it is used: only a terminal gets a bar.
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task(self.title, total=self.steps, loss=float("nan"))
            self.bar.start()
        return self

    def __call__(self, state: StepState) -> None:
        # Observers of a parameter server's job are called at its end, when `working` has shown most steps.
        done = state.step + 1
        if done > self.done or done == self.steps:
            self._show(done, state.loss, always=self.ends and done in (1, self.steps))

    def working(self, done: int, loss: float) -> None:
        """Show the steps of a worker whose ranks have no common step, and its part of the loss, scaled to the whole."""
        self._show(done, loss, always=self.ends and done == 1)

    def _show(self, done: int, loss: float, always: bool) -> None:
        self.done = max(self.done, done)
        if self.bar is not None:
            self.bar.update(self.task, completed=done, loss=loss)
            return
        now = time.monotonic()
        if now - self.last > self.wait:
            self.last, self.wait, always = now, min(2 * self.wait, MOST_SECONDS_BETWEEN_LINES), True
        if always:
            print(f"{self.title}: {done}/{self.steps} steps  loss {loss:.4f}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()


class Clock:
    """Prints lines with the seconds so far while a block runs whose steps are not known: 2, 6, 14, ... seconds."""

    def __init__(self, title: str, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self.title, self.seconds = title, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="minidist progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _work(self) -> None:
        began, wait = time.monotonic(), self.seconds
        while not self._ended.wait(wait):
            wait = min(2 * wait, MOST_SECONDS_BETWEEN_LINES)
            print(f"{self.title}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
