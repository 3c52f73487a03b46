"""A job on a rank: the loop of `loop.py`, with what a job does in addition before, in and after each step.

    before_step             the batch and the layout of the step
    after_forward_backward  techniques, before losses are exchanged
    updates                 a loss that is not finite ends the job; techniques may leave the update out
    after_step              the clock and the trace, the held-out loss, the observers, a checkpoint

Proved by: tests/equality/test_equality.py, tests/train/test_axes.py, tests/train/test_account.py
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from minidist.autograd import FlopCounter
from minidist.base import arrays as xp
from minidist.base.memory import MemoryAccount, account_memory, thinned
from minidist.base.trace import SpanEvent
from minidist.comm import Comm
from minidist.job.config.train_config import TrainConfig, resolve_batches, updates_of
from minidist.job.train import loop
from minidist.job.train.job import Job
from minidist.job.train.loss import NonFiniteError
from minidist.job.train.parameter_server_trainer import run_parameter_server
from minidist.job.train.run import Run, begin, serve
from minidist.job.train.state import Observer, StepState, TrainResult, reads_tensors
from minidist.job.train.strategies.strategy import Strategy
from minidist.techniques import Moment, of_job, trains_alone

TIMELINE_STEPS, TIMELINE_RANKS = 3, 8  # of whose memory the trace has samples; later steps are like the second
MAX_SAMPLES = 3_000  # of a rank; a picture of one step draws 500 of them


def train(comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False) -> TrainResult:
    """Train on all ranks of `comm`, laid out as `recipe.parallelize` does.

    What each rank sends is in `planning/volumes.py` in closed form; in every case its micro-batches' losses (8 B each,
    purpose metrics), and at the start the first rank of the data axis sends the weights (purpose startup). timeline:
    write the memory in use over time into the trace, for the first steps and ranks.
    """
    if config.strategy == "ps":
        return run_parameter_server(comm, config, observers).result
    batches, world = resolve_batches(config, comm.size), comm
    for extension in of_job(config):
        # The last ranks do something else; the others train as they would without them.
        if extension.beside(config):
            layout = range(batches.dims.ranks)
            if comm.rank not in layout:
                return serve(extension, comm, config, batches)
            comm = comm.group(layout, extension.trainers)

    clock = comm.time if timeline and comm.rank < TIMELINE_RANKS else None
    # quiet_overflow: an overflow is one error from `before_update`, not a warning in every step.
    with account_memory(clock=clock) as account, FlopCounter() as flops, xp.quiet_overflow(), ExitStack() as stack:
        run = begin(comm, world, config, batches, reads_tensors(observers), stack)
        building = account.begin_peak()  # every rank builds the whole model, and keeps its part
        run.attach()
        hooks = JobHooks(run, observers, flops, account if clock is not None else None)
        loop.train(run.strategy, range(run.done, config.steps), hooks)
        return run.result(building, account)


@dataclass
class JobHooks(loop.Hooks):
    """What a job does in a step. account: whose samples become the memory of the trace; None keeps none."""

    run: Run
    observers: Sequence[Observer]
    flops: FlopCounter
    account: MemoryAccount | None
    began: float = 0.0  # the step, on the virtual clock
    made: bool = True  # whether its update was made

    def before_step(self, strategy: Any, step: int) -> Strategy:
        run = self.run
        self.began = run.comm.time()
        run.comm.world.place = run.place(step)
        run.job.next_batch()
        return run.strategy

    def after_forward_backward(self, strategy: Any, step: int) -> None:
        for extension in self.run.job.extensions:
            extension.after_forward_backward(strategy, step)

    def updates(self, strategy: Any, step: int, loss: float) -> bool:
        self.run.losses.append(loss)
        self.made = before_update(self.run.job, strategy, step, loss, self.run.comm)
        self.run.skipped += not self.made
        return self.made

    def after_step(self, strategy: Any, step: int, loss: float) -> None:
        run, comm, config = self.run, self.run.comm, self.run.config
        after_update(run.job, strategy, step, self.made, comm)

        # The virtual clock advances by the operations of the update, and the step becomes a span of the trace.
        comm.compute(self.flops.take(), name="optimizer")
        comm.trace.add_span(SpanEvent(comm.rank, "main", f"step {step}", self.began, comm.time(), "step"))
        if self.account is not None and step + 1 - run.done == min(TIMELINE_STEPS, config.steps - run.done):
            self.account.stop()
            comm.trace.memory.extend(thinned(self.account.samples(), MAX_SAMPLES))

        # The held-out loss, the observers, the layout of the next step, a checkpoint.
        held_out = run.evaluate(step + 1)
        if held_out:
            comm.compute(self.flops.take(), name="evaluation")
        for observer in self.observers:
            observer(StepState(comm.rank, step, loss, run.job, run.strategy, held_out, comm))
        run.change_layout(step + 1)
        run.save(step + 1)


def finish_step(job: Job, strategy: Strategy, step: int, loss: float, comm: Comm | None = None) -> None:
    """Update the weights after the backward pass of a step, the same on every rank and on one device.

    comm: all ranks; None on one device.
    """
    made = before_update(job, strategy, step, loss, comm)
    if made:
        strategy.update(step)
    after_update(job, strategy, step, made, comm)


def before_update(job: Job, strategy: Strategy, step: int, loss: float, comm: Comm | None) -> bool:
    """Return whether the update is made: a technique may leave it out on every rank.

    Raises NonFiniteError where the loss is not finite. Nothing is clipped before the techniques have said by what the
    gradients are to be multiplied, so that the norm is that of the true gradient.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {step}: the loss is {loss}; {_first_non_finite(strategy)}; lower --lr{_or_clip(job)}"
        )
    for extension in job.extensions:
        extension.after_backward(strategy, step)

    # Every rank makes the update, or every rank leaves it out.
    return all(extension.updates(strategy, comm) for extension in job.extensions)


def after_update(job: Job, strategy: Strategy, step: int, made: bool, comm: Comm | None) -> None:
    """Let the techniques look at the weights, or change them: what holds from the next step on."""
    for extension in job.extensions:
        extension.after_update(Moment(comm, range(step, step + 1), strategy, skipped=not made))


def _or_clip(job: Job) -> str:
    """Return the second remedy for a diverging loss, where the rules allow --clip and it is not set."""
    config = job.config
    asynchronous = config.pp > 1 and updates_of(config.schedule) != "flush"
    refused = asynchronous or trains_alone(config) or config.clip is not None
    return "" if refused else " or clip the gradient (--clip 1)"


def _first_non_finite(strategy: Strategy) -> str:
    tensors = strategy.tensors()
    for name, array in tensors["weights"].items():
        if not xp.isfinite(array).all():
            return f"the first parameter with a value that is not finite is {name!r}"
    for name, array in tensors["gradients"].items():
        if not xp.isfinite(array).all():
            return f"all parameters are finite, the first gradient that is not is that of {name!r}"
    return "all parameters and gradients are finite, so it comes from the data or the loss"
