"""The training loop, as a function of a communicator: the same code on one rank, simulated ranks and MPI processes.

for each step
    1 for each of this rank's micro-batches: forward, backward (gradients are sent while backward runs)
    2 the loss of the step, summed over all micro-batches in their global order
    3 clip, learning rate, optimizer step, unless a technique leaves the update out; the batch of the next step
    4 evaluate, call the observers, change the layout, save

Proved by: tests/equality/test_equality.py, tests/train/test_axes.py, tests/train/test_account.py
"""

import gc
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter

from minidist.autograd import FlopCounter
from minidist.base import arrays as xp
from minidist.base.exponents import count_exponents
from minidist.base.memory import account_memory, thinned
from minidist.base.trace import SpanEvent
from minidist.comm import Comm
from minidist.job.checkpoint.resume import resume_job, resumed_config, save_job, saved_bytes, saving_alone
from minidist.job.checkpoint.saved_model import SavedModel
from minidist.job.config.train_config import Batches, TrainConfig, resolve_batches, updates_of
from minidist.job.train.evaluate import evaluate
from minidist.job.train.job import Job, build
from minidist.job.train.loss import NonFiniteError, global_loss
from minidist.job.train.parameter_server_trainer import run_parameter_server
from minidist.job.train.recipe import parallelize, rebuild
from minidist.job.train.state import Observer, Phase, StepState, TrainResult, reads_tensors
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.strategy import Strategy
from minidist.techniques import Extension, Moment, of_job, trains_alone

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
        # No other job saves into the same directory while this one runs.
        storage = stack.enter_context(saving_alone(comm, config))

        # The model on this rank, from the seed or from a checkpoint.
        job = build(resumed_config(config, batches), batches, comm)
        job.keep_gradients = reads_tensors(observers)
        strategy = parallelize(job, comm)
        done, losses = resume_job(config.save, job, strategy) if config.resume and config.save else (0, [])
        for extension in job.extensions:
            extension.begin(world, strategy, done)
        for extension in job.extensions:
            reading = extension.reading(job.sampler, strategy.axes.dp.rank, strategy.steps_read(done))
            job.sampler = stack.enter_context(reading)
        held_out: dict[int, float] = {}
        phases: list[Phase] = []  # the layouts that have ended
        skipped = 0  # steps whose update was left out
        saved = done  # the steps of the last checkpoint, 0 without one
        building = account.begin_peak()  # every rank builds the whole model, and keeps its part

        attached = stack.enter_context(ExitStack())
        attach(job, strategy, attached)

        for step in range(done, config.steps):
            began = comm.time()
            comm.world.place = place_of(config, step, saved)

            # 1, 2: forward and backward of this rank's micro-batches; the loss of all ranks.
            job.next_batch()
            strategy.zero_grad()
            parts = strategy.forward_backward(step)
            for extension in job.extensions:
                extension.after_forward_backward(strategy, step)
            losses.append(global_loss(strategy.axes.data, parts))

            # 3: the update.
            skipped += not finish_step(job, strategy, step, losses[-1], comm)

            # The virtual clock advances by the update's operations, and the step becomes a span of the trace.
            comm.compute(flops.take(), name="optimizer")
            comm.trace.add_span(SpanEvent(comm.rank, "main", f"step {step}", began, comm.time(), "step"))
            if clock is not None and step + 1 - done == min(TIMELINE_STEPS, config.steps - done):
                account.stop()
                comm.trace.memory.extend(thinned(account.samples(), MAX_SAMPLES))

            # 4: the held-out loss, the observers, a checkpoint.
            held_out_losses: dict[str, float] = {}
            if config.evaluate_every and (step + 1) % config.evaluate_every == 0:
                held_out_losses = evaluations(job, step + 1, partial(evaluate, job, strategy))
                held_out[step + 1] = held_out_losses["held_out_loss"]
                comm.compute(flops.take(), name="evaluation")
            for observer in observers:
                observer(StepState(comm.rank, step, losses[-1], job, strategy, held_out_losses, comm))

            # The layout of the next step, and what belongs to it; the gradients of this one are used up.
            following = next_layout(strategy, step + 1, comm)
            if following is not strategy:
                phases.append(phase_of(strategy, config, phases, step + 1 - done, skipped))
                job, strategy = following.job, following
                # Parameters and their flat arrays refer to each other, so only the collector frees the old ones.
                gc.collect()
                attach(job, strategy, attached)
            if config.save and (step + 1 == config.steps or (config.every and (step + 1) % config.every == 0)):
                save_job(comm, config.save, job, strategy, step + 1, losses, storage)
                saved = step + 1

        training = account.peak, account.at_peak
        peak_bytes, peak_by_purpose = max(building, training, key=itemgetter(0))
        return TrainResult(
            rank=comm.rank,
            losses=losses,
            peak_bytes=peak_bytes,
            peak_by_purpose=dict(peak_by_purpose),
            step_peak=dict(training[1]),
            checkpoint_bytes=saved_bytes(comm, strategy, storage) if config.save else {},
            sizes=strategy.sizes(),
            digest=digest(strategy),
            first_step=done,
            skipped=skipped,
            gradient_exponents=count_exponents(strategy.gradients(), job.scale),
            held_out=held_out,
            runs=job.plan.runs,
            phases=[*phases, phase_of(strategy, config, phases, config.steps - done, skipped)],
            measured={key: value for extension in job.extensions for key, value in extension.result().items()},
        )


def serve(extension: Extension, comm: Comm, config: TrainConfig, batches: Batches) -> TrainResult:
    """Do, on a rank beside the layout, what the technique that asked for it does there in place of training."""
    with account_memory() as account, FlopCounter(), xp.quiet_overflow():
        done = extension.serve(comm, config, batches, SavedModel)
    peak, measured = dict(account.at_peak), extension.result()
    return TrainResult(comm.rank, [], account.peak, peak, [], "", done, measured=measured)


def attach(job: Job, strategy: Strategy, attached: ExitStack) -> None:
    """Attach the extensions of a job to its layout, in place of an earlier layout."""
    attached.close()
    for extension in job.extensions:
        attached.enter_context(extension.attached(strategy))


def next_layout(strategy: MeshStrategy, done: int, comm: Comm) -> MeshStrategy:
    """Return the strategy of the steps after the first `done`: the same, unless a technique changes the layout."""
    for extension in strategy.job.extensions:
        strategy = extension.next_layout(strategy, done, partial(rebuild, strategy.job, comm))
    return strategy


def phase_of(strategy: MeshStrategy, config: TrainConfig, ended: Sequence[Phase], steps: int, skipped: int) -> Phase:
    """Return the phase of a layout that ends after `steps` steps of this run. ended: the phases before it.

    config: with which the run began. skipped: steps of this run whose update was left out.
    """
    return Phase(
        {name: value for name, value in strategy.job.config if value != getattr(config, name)},
        strategy.sizes(),
        steps - sum(phase.steps for phase in ended),
        skipped - sum(phase.skipped for phase in ended),
    )


def place_of(config: TrainConfig, step: int, saved: int) -> str:
    """Return where a job is and what is left of it when it is interrupted.

    Steps are numbered from 0; `step` of them are done. saved: how many were done at the last checkpoint.
    """
    place = f"step {step}, with {step} of {config.steps} steps done"
    if config.save is None:
        return f"{place}; nothing was saved, --save DIRECTORY writes checkpoints"
    if saved == 0:
        return f"{place}; no checkpoint was written yet to {config.save}"
    return f"{place}; the last checkpoint has {saved} steps and is in {config.save}; --resume goes on from it"


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


def evaluations(job: Job, done: int, loss: Callable[[], float]) -> dict[str, float]:
    """Return the loss on held-out data after `done` steps, and those of techniques, by name. loss: computes it."""
    losses = {"held_out_loss": loss()}
    for extension in job.extensions:
        losses |= extension.evaluate(done, loss)
    return losses


def digest(strategy: Strategy) -> str:
    """Return a fingerprint of the weights and the optimizer state that this rank holds: equal digests, equal bits."""
    result = hashlib.sha256()
    for array in strategy.local_arrays():
        result.update(array.tobytes())
    for name, arrays in sorted(strategy.optimizer_state().items()):
        for key, array in sorted(arrays.items()):
            result.update(f"{name}.{key}".encode() + array.tobytes())
    return result.hexdigest()


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
