"""What a training step shows to observers, and what a job returns: data types without behaviour.

The loops (`trainer`, or that of a technique) import these types and fill them in, so an observer imports no loop.

Proved by: tests/equality/test_equality.py, tests/train/test_evaluate.py
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minidist.core.comm import Comm
from minidist.data import Shares
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import AxisSizes
from minidist.job.train.strategies.mesh import MeshStrategy


class StepEnd(NamedTuple):
    """When a step ended on a rank (`time.perf_counter`, seconds), and the bytes that it had sent until then."""

    seconds: float
    bytes_sent: int

    @classmethod
    def now(cls, comm: Comm | None) -> "StepEnd":
        """Return the end of a step that ends at this moment. comm: None on one device, which sends nothing."""
        sent = 0 if comm is None else sum(comm.trace.bytes_by_purpose().values())
        return cls(time.perf_counter(), sent)


@dataclass
class StepState:
    """What an observer sees after a step, before the gradients are cleared.

    strategy: None with an `OwnLoop`, where no rank holds the whole state. comm: None on one device. end: where
    observers are called later than the step ended, None elsewhere.
    """

    rank: int
    step: int
    loss: float
    job: Job
    strategy: MeshStrategy | None
    held_out_losses: Mapping[str, float] = field(default_factory=dict)  # in the steps in which they were computed
    comm: Comm | None = None
    end: StepEnd | None = None


# Called after every step. With an attribute `reads_tensors` that is false it promises not to call
# `state.strategy.tensors()`, so that an asynchronous pipeline keeps no gradients for it.
Observer = Callable[[StepState], None]


def reads_tensors(observers: Iterable[Observer]) -> bool:
    """Return whether one of the observers may ask for the tensors of every step."""
    return any(getattr(observer, "reads_tensors", True) for observer in observers)


@dataclass(frozen=True)
class Phase:
    """Steps that were made with one layout, as one rank saw them.

    changed: the settings in which it differs from the job's. sizes: of the rank's data axes. skipped: steps whose
    gradients overflowed.
    """

    changed: dict[str, Any]
    sizes: list[AxisSizes]
    steps: int
    skipped: int


@dataclass
class TrainResult:
    """One rank's outcome of a job. `peak_bytes`: the most bytes alive at once, over all purposes.

    step_peak: the most of the steps alone, by purpose; while a rank builds its part, it has the whole model.
    held: by purpose, the bytes at the end of the steps. highest: the most of each purpose on its own.
    """

    rank: int
    losses: list[float]
    peak_bytes: int
    peak_by_purpose: dict[str, int]
    sizes: list[AxisSizes]
    digest: str
    first_step: int = 0  # after a resume, the number of steps done before
    skipped: int = 0  # steps of this run whose update a technique left out
    gradient_exponents: dict[str, int] = field(default_factory=dict)  # of the last step, unscaled: see base.exponents
    held_out: dict[int, float] = field(default_factory=dict)  # steps done -> loss on data that is never trained on
    runs: list[tuple[Shares, int]] = field(default_factory=list)  # the rows of all ranks, and for how many steps
    phases: list[Phase] = field(default_factory=list)  # the layouts that the job had, in order
    checkpoint_bytes: dict[int, int] = field(default_factory=dict)  # see `checkpoint.resume.saved_bytes`; with --save
    step_peak: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)  # what the techniques report: see `Extension.result`
