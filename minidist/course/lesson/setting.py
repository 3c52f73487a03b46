"""What many lessons need in addition to their subject: a picture with its caption, and a job that takes a second.

    picture("lanes", world, "part 3 of lesson 11", name="ZeRO 1")                 drawn from the run of `world`
    SimWorld(3).run(train, small_job(dp=3, zero=2, steps=2))                      a small GPT
    with memory_of(comm) as account: ...                                          bytes alive, kept for a picture
    with marked_step(comm, 0): ...                                                a step that `only_steps` finds

Proved by: tests/lesson/test_setting.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidist.base.memory import MemoryAccount
    from minidist.core.comm import Comm
    from minidist.job.config.train_config import TrainConfig

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "data": "markov", "reduction": "ordered"}


def small_job(**settings: Any) -> "TrainConfig":
    """Return the settings of a job on a small GPT; `settings` replaces some of them, or adds others.

    One layer of width 16 with 2 heads, texts of 8 tokens from a Markov chain, gradients that are added in the order of
    the ranks. Raises what TrainConfig raises for settings that do not fit together.
    """
    from minidist.job.config.train_config import TrainConfig

    return TrainConfig.make(**{**SMALL, **settings})


def picture(kind: str, run: Any, command: str, names: tuple[str, str] | None = None, **header: Any) -> None:
    """Show a picture of a run, as `minidist report` draws it.

    kind: one of the pictures of `minidist report`. run: a world that has run, or traces. command: the caption, whole
    commands that draw this very picture, or the part of the lesson that does. names: of the two curves of "loss".
    header: `name` (of the run, before the picture's own title) or `title`, and what the picture needs besides the run:
    `losses`, `closed_form` and others (minidist/report/draw.py). Nothing is shown in a script.
    """
    from minidist.report import draw, show

    traces = getattr(run, "traces", run)
    show(draw(kind, traces, {"command": command, **header}, **({"names": names} if names else {})))


@contextmanager
def memory_of(comm: "Comm") -> "Iterator[MemoryAccount]":
    """Count the bytes that are alive on this rank, and keep them in its trace for the picture "memory"."""
    from minidist.base.memory import account_memory

    with account_memory(timeline=True) as account:
        yield account
    comm.trace.memory = [(0.0, live) for live in account.history()]


@contextmanager
def marked_step(comm: "Comm", number: int) -> Iterator[None]:
    """Mark what runs inside as step `number` in this rank's trace, as the trainer does."""
    from minidist.base.traces import SpanEvent

    began = comm.time()
    yield
    comm.trace.add_span(SpanEvent(comm.rank, "main", f"step {number}", began, comm.time(), "step"))
