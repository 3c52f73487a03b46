"""The training loop, as a function of a communicator: the same code on one rank, simulated ranks and MPI processes.

for each step
    1 for each of this rank's micro-batches: forward, backward (gradients are sent while backward runs)
    2 the loss of the step, summed over all micro-batches in their global order
    3 clip, learning rate, optimizer step, unless a technique leaves the update out; the batch of the next step
    4 evaluate, call the observers, change the layout, save

Proved by: tests/equality/test_equality.py, tests/train/test_axes.py, tests/train/test_account.py
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack

from minidist.autograd import FlopCounter
from minidist.base import arrays as xp
from minidist.base.memory import account_memory, thinned
from minidist.base.trace import SpanEvent
from minidist.comm import Comm
from minidist.job.config.train_config import TrainConfig, resolve_batches, updates_of
from minidist.job.train.job import Job
from minidist.job.train.loss import NonFiniteError, global_loss
from minidist.job.train.parameter_server_trainer import run_parameter_server
from minidist.job.train.run import begin, serve
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
    # quiet_overflow: an overflow is one error from `finish_step`, not a warning in every step.
    with account_memory(clock=clock) as account, FlopCounter() as flops, xp.quiet_overflow(), ExitStack() as stack:
        run = begin(comm, world, config, batches, reads_tensors(observers), stack)
        building = account.begin_peak()  # every rank builds the whole model, and keeps its part
        run.attach()

        for step in range(run.done, config.steps):
            began = comm.time()
            comm.world.place = run.place(step)

            # 1, 2: forward and backward of this rank's micro-batches; the loss of all ranks.
            run.job.next_batch()
            run.strategy.zero_grad()
            parts = run.strategy.forward_backward(step)
            for extension in run.job.extensions:
                extension.after_forward_backward(run.strategy, step)
            run.losses.append(global_loss(run.strategy.axes.data, parts))

            # 3: the update. The virtual clock advances by its operations, and the step becomes a span of the trace.
            run.skipped += not finish_step(run.job, run.strategy, step, run.losses[-1], comm)
            comm.compute(flops.take(), name="optimizer")
            comm.trace.add_span(SpanEvent(comm.rank, "main", f"step {step}", began, comm.time(), "step"))
            if clock is not None and step + 1 - run.done == min(TIMELINE_STEPS, config.steps - run.done):
                account.stop()
                comm.trace.memory.extend(thinned(account.samples(), MAX_SAMPLES))

            # 4: the held-out loss, the observers, the layout of the next step, a checkpoint.
            held_out = run.evaluate(step + 1)
            if held_out:
                comm.compute(flops.take(), name="evaluation")
            for observer in observers:
                observer(StepState(comm.rank, step, run.losses[-1], run.job, run.strategy, held_out, comm))
            run.change_layout(step + 1)
            run.save(step + 1)
        return run.result(building, account)


def finish_step(job: Job, strategy: Strategy, step: int, loss: float, comm: Comm | None = None) -> bool:
    """Make step 3: update the weights, the same on every rank and on one device.

    Returns whether the update was made: a technique may leave it out on every rank. comm: all ranks; None on one
    device.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {step}: the loss is {loss}; {_first_non_finite(strategy)}; lower --lr{_or_clip(job)}"
        )

    for extension in job.extensions:
        extension.after_backward(strategy, step)

    made = _update(job, strategy, step, comm)

    # What holds from the next step on.
    for extension in job.extensions:
        extension.after_update(Moment(comm, range(step, step + 1), strategy, skipped=not made))
    return made


def _update(job: Job, strategy: Strategy, step: int, comm: Comm | None) -> bool:
    """Clip and step; return whether the update was made."""
    # Every rank makes the update, or every rank leaves it out.
    if not all(extension.updates(strategy, comm) for extension in job.extensions):
        return False

    # After techniques have said by what the gradients are to be multiplied, so that the norm is that of the true one.
    if job.config.clip is not None:
        strategy.clip(job.config.clip)
    strategy.step(job.lr_factor(step))
    return True


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
