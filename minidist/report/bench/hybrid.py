"""What does a hybrid step cost without its arithmetic and its messages? The processor time that Python itself takes.

The same layout trains two models with the same modules, micro-batches and messages: the GPT of `bench step`, and one so
small (width 16, 4 tokens) that its arithmetic takes next to nothing. What the small one takes outside of messages is
the overhead: nodes, hooks, buckets, plans, data. It is an upper bound, for the small arrays' arithmetic is in it.
Processor time is measured, not wall time, so ranks may share cores; the time inside sends, receives and waits is no
overhead. It is compared with the whole step, and with the step without its messages.

Proved by: tests/bench/test_hybrid.py
"""

import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

from minidist.comm.mpi.direct import DirectCall, DirectComm
from minidist.comm.mpi.world import MPIWorld
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build
from minidist.job.train.recipe import parallelize
from minidist.job.train.update import finish_step
from minidist.report.bench.harness import report_with_torch, run_ranks

TARGET = 0.10
LARGE = {"layers": 4, "width": 256, "heads": 8, "context": 128}
SMALL = {"layers": 4, "width": 16, "heads": 8, "context": 4}
STEPS = 3  # in a round


class ProcessTimer:
    """Sums the processor time inside the calls that are given to it; a call inside another one counts once."""

    def __init__(self) -> None:
        self.seconds, self.inside = 0.0, False

    def __call__(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        # A wait inside an exchange is part of its time already.
        if self.inside:
            return function(*arguments, **keywords)
        self.inside, began = True, time.process_time()
        try:
            return function(*arguments, **keywords)
        finally:
            self.seconds += time.process_time() - began
            self.inside = False


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a world, or of its communicators, whose processor time is measured."""

    @wraps(method)
    def measured(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self, "world", self).timer(method, self, *arguments, **keywords)

    return measured


class TimedCall(DirectCall):
    """One collective call of a rank."""

    sendrecv = timed(DirectCall.sendrecv)


class TimedComm(DirectComm):
    """A rank's handle on a group of ranks."""

    call_class, sendrecv = TimedCall, timed(DirectComm.sendrecv)


class TimedWorld(MPIWorld):
    """An MPI world that measures the processor time inside sends, receives and waits (`timer`)."""

    direct = TimedComm

    def __init__(self, **settings: Any) -> None:
        self.timer = ProcessTimer()
        super().__init__(**settings)

    post, wait, wait_work = timed(MPIWorld.post), timed(MPIWorld.wait), timed(MPIWorld.wait_work)
    run_async, progress = timed(MPIWorld.run_async), timed(MPIWorld.progress)


def bench_hybrid(rounds: int = 8, dp: int = 2, tp: int = 2, pp: int = 2) -> dict[str, Any]:
    """Return {environment, rows}: the overhead's share of a step. Starts mpiexec with dp x tp x pp processes."""
    if rounds < 1:
        raise UsageError(f"bench hybrid: --rounds {rounds}; it must be 1 or more")
    layout = {"dp": dp, "tp": tp, "pp": pp, "microbatches": 2, "global_batch": 8}
    # Both jobs must keep the rules, before mpiexec starts.
    for sizes in (LARGE, SMALL):
        config = TrainConfig.make(**layout, **sizes, data="markov")
        check_rules(config, resolve_batches(config, dp * tp * pp))
    return run_ranks(main, dp * tp * pp, layout, rounds)


def make_step(comm: Comm, layout: dict[str, int], sizes: dict[str, int]) -> Callable[[int], None]:
    """Return one training step of the layout on this rank, as `train` does it."""
    config = TrainConfig.make(**layout, **sizes, data="markov", steps=1000)

    # The parts of `trainer.train`, without observers and checkpoints.
    job = build(config, resolve_batches(config, comm.size), comm)
    strategy = parallelize(job, comm)

    def step(number: int) -> None:
        strategy.zero_grad()
        finish_step(job, strategy, number, sum(strategy.forward_backward(number)), comm)

    return step


def main(layout: dict[str, int], rounds: int) -> None:
    """Run one rank of the benchmark."""
    report_with_torch(partial(measure, layout, rounds), False, TimedWorld)


def measure(layout: dict[str, int], rounds: int, world: Any, with_torch: bool) -> list[dict[str, Any]]:
    """Return the rows of the two models on this world, which is a `TimedWorld`."""
    steps = {name: make_step(world.comm, layout, sizes) for name, sizes in (("large", LARGE), ("small", SMALL))}
    outside: dict[str, list[float]] = {name: [] for name in steps}
    whole: list[float] = []  # of the large model, messages included
    # Processor time of the step, minus that inside messages; the first round warms up.
    for number in range(rounds + 1):
        for name, step in steps.items():
            world.base.barrier()
            began, messages = time.process_time(), world.timer.seconds
            for i in range(STEPS):
                step(STEPS * number + i)
            spent = time.process_time() - began
            if number:
                outside[name].append((spent - (world.timer.seconds - messages)) / STEPS)
                whole += [spent / STEPS] if name == "large" else []

    # Processor time of all ranks together: a rank that waits for another one spends none.
    here = [float(np.median(times)) for times in (whole, outside["large"], outside["small"])]
    sums = np.array(world.base.allgather(here)).sum(0)
    return rows(layout, world.size, rounds, *map(float, sums))


def rows(
    layout: dict[str, int], ranks: int, rounds: int, whole: float, arithmetic: float, overhead: float
) -> list[dict[str, Any]]:
    """Return the overhead's share of the whole step, and of the step without its messages."""
    name = "dp {dp} x tp {tp} x pp {pp}: Python's overhead".format(**layout)
    # The small model's time outside messages over the large model's time.
    return [
        {"name": f"{name} in {what}", "ratio": overhead / of, "median_s": of / ranks, "rounds": rounds, **goal}
        for what, of, goal in (("the step", whole, {"target": TARGET}), ("the step without messages", arithmetic, {}))
    ]
