"""A job on a rank: which part of it this rank has, and the loop of `core/train/parallelize.py` that trains it.

    begin                   the model, the layout, and where the job is resumed, its state
    before_step             the batch of the step
    after_forward_backward  techniques
    is_updated              techniques; a loss that is not finite ends the job
    after_step              the clock and the trace; the observers
        evaluate                every N steps: the loss on held-out data
        change_layout           techniques may give the next steps another layout
        save                    every N steps, and at the end: a checkpoint
    result                  what `train` returns

Proved by: tests/train/test_account.py, tests/train/test_axes.py, tests/equality/test_equality.py,
tests/checkpoint/test_resume.py, tests/techniques/test_repartition.py
"""

import gc
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from minidist.base import arrays as xp
from minidist.base.exponents import count_exponents
from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import MemoryAccount, account_memory, thinned
from minidist.base.traces import SpanEvent
from minidist.core.comm import Comm
from minidist.core.train.parallelize import Loop
from minidist.job import checkpoint
from minidist.job.config.rules import MEANING, check_rules
from minidist.job.config.train_config import Batches, TrainConfig, resolve_batches
from minidist.job.train.evaluate import evaluate, evaluations
from minidist.job.train.job import Job, build
from minidist.job.train.recipe import parallelize, rebuild
from minidist.job.train.state import Observer, Phase, StepState, TrainResult
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.update import after_update, before_update
from minidist.techniques import Extension, of_job, own_loop

Peak = tuple[int, Mapping[str, int]]  # the most bytes alive at once, and how many of them were of each purpose


TIMELINE_STEPS, TIMELINE_RANKS = 3, 8  # of whose memory the trace has samples; later steps are like the second
MAX_SAMPLES = 3_000  # of a rank; a picture of one step draws 500 of them


def train(comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False) -> TrainResult:
    """Train on all ranks of `comm`, laid out as `recipe.parallelize` does.

    What each rank sends is in `planning/volumes.py` in closed form; in every case its micro-batches' losses (8 B each,
    purpose metrics), and at the start the first rank of the data axis sends the weights (purpose startup). timeline:
    write the memory in use over time into the trace, for the first steps and ranks. Errors: UsageError with the
    sentence of docs/rules.md when settings do not combine; a setting without effect is refused on command lines alone.
    """
    batches, world = resolve_batches(config, comm.size), comm
    check_rules(config, batches, 0, MEANING)
    loop = own_loop(config)
    if loop is not None:
        return loop.train(comm, observers)  # type: ignore[no-any-return]
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
        run = begin(comm, world, config, batches, observers, stack)
        building = account.begin_peak()  # every rank builds the whole model, and keeps its part
        run.attach()
        run.flops, run.account = flops, account if clock is not None else None
        run.train(range(run.done, config.steps))
        return run.result(building, account)


@dataclass
class Run(Loop):
    """What a rank has of a job.

    job, strategy: of the layout in use. storage: an argument of `save_job`; None in a job that does not save. done:
    the number of steps of earlier runs; saved: of those before the last checkpoint, 0 without one. skipped: how many
    steps of this run had no update. phases: the layouts that have ended. observers: are called after every step. flops:
    counts the operations of evaluations and updates for the virtual clock. account: the memory account whose samples
    are written to the trace; None writes none. began: when the step began, in seconds. made: whether it had an update.
    """

    comm: Comm
    config: TrainConfig
    job: Job
    strategy: MeshStrategy
    done: int
    losses: list[float]
    storage: Any
    attached: ExitStack
    saved: int = 0
    skipped: int = 0
    held_out: dict[int, float] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    observers: Sequence[Observer] = ()
    flops: FlopCounter = field(default_factory=FlopCounter)
    account: MemoryAccount | None = None
    began: float = 0.0
    made: bool = True

    # --- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        self.began = self.comm.time()
        self.comm.world.place = place_of(self.config, step, self.saved)
        self.job.next_batch()

    def after_forward_backward(self, step: int) -> None:
        for extension in self.job.extensions:
            extension.after_forward_backward(self.strategy, step)

    def is_updated(self, step: int) -> bool:
        self.made = before_update(self.job, self.strategy, step, self.losses[-1], self.comm)
        self.skipped += not self.made
        return self.made

    def after_step(self, step: int) -> None:
        comm, done = self.comm, step + 1
        after_update(self.job, self.strategy, step, self.made, comm)

        # The virtual clock advances by the operations of the update, and the step becomes a span of the trace.
        comm.compute(self.flops.take(), name="optimizer")
        comm.trace.add_span(SpanEvent(comm.rank, "main", f"step {step}", self.began, comm.time(), "step"))
        if self.account is not None and done - self.done == min(TIMELINE_STEPS, self.config.steps - self.done):
            self.account.stop()
            comm.trace.memory.extend(thinned(self.account.samples(), MAX_SAMPLES))

        # The held-out loss, the observers, the layout of the next step, a checkpoint.
        held_out = self.evaluate(done)
        if held_out:
            comm.compute(self.flops.take(), name="evaluation")
        for observer in self.observers:
            observer(StepState(comm.rank, step, self.losses[-1], self.job, self.strategy, held_out, comm))
        self.change_layout(done)
        self.save(done)

    # --- between two steps --------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the extensions of the job to its layout, in place of an earlier layout."""
        self.attached.close()
        for extension in self.job.extensions:
            if (context := extension.attached(self.strategy)) is not None:
                self.attached.enter_context(context)

    def evaluate(self, done: int) -> dict[str, float]:
        """Return the losses on held-out data by name, when `done` steps are a multiple of --evaluate-every."""
        if not self.config.evaluate_every or done % self.config.evaluate_every:
            return {}
        losses = evaluations(self.job, done, partial(evaluate, self.job, self.strategy))
        self.held_out[done] = losses["held_out_loss"]
        return losses

    def change_layout(self, done: int) -> None:
        """Take the layout of the steps after the first `done`: the same, unless a technique changes it.

        The gradients of the last step are used up.
        """
        strategy = self.strategy
        for extension in strategy.job.extensions:
            strategy = extension.next_layout(strategy, done, partial(rebuild, strategy.job, self.comm))
        if strategy is self.strategy:
            return
        self.phases.append(self._phase(done))
        self.job, self.strategy = strategy.job, strategy
        # Parameters and their flat arrays refer to each other, so only the collector frees the old ones.
        gc.collect()
        self.attach()

    def _phase(self, done: int) -> Phase:
        """Return the phase of the layout in use, which ends after `done` steps."""
        settings = self.job.config.model_dump()
        return Phase(
            {name: value for name, value in settings.items() if value != getattr(self.config, name)},
            self.strategy.sizes(),
            done - self.done - sum(phase.steps for phase in self.phases),
            self.skipped - sum(phase.skipped for phase in self.phases),
        )

    def save(self, done: int) -> None:
        """Write a checkpoint when `done` steps are all, or a multiple of --every."""
        config = self.config
        if config.save and (done == config.steps or (config.every and done % config.every == 0)):
            checkpoint.save_job(self.comm, config.save, self.job, self.strategy, done, self.losses, self.storage)
            self.saved = done

    def result(self, building: Peak, account: MemoryAccount) -> TrainResult:
        """Return the outcome. building: the peak of memory before the first step; account: has that of the steps."""
        peak_bytes, peak_by_purpose = max(building, (account.peak, account.at_peak), key=itemgetter(0))
        job, strategy, last = self.job, self.strategy, self._phase(self.config.steps)
        return TrainResult(
            rank=self.comm.rank,
            losses=self.losses,
            peak_bytes=peak_bytes,
            peak_by_purpose=dict(peak_by_purpose),
            step_peak=dict(account.at_peak),
            held=dict(account.by_purpose),
            highest=dict(account.peak_by_purpose),
            checkpoint_bytes=checkpoint.saved_bytes(self.comm, strategy, self.storage) if self.config.save else {},
            sizes=last.sizes,
            digest=digest(strategy),
            first_step=self.done,
            skipped=self.skipped,
            gradient_exponents=count_exponents(strategy.gradients(), job.scale),
            held_out=self.held_out,
            runs=job.plan.runs,
            phases=[*self.phases, last],
            measured={key: value for extension in job.extensions for key, value in extension.result().items()},
        )


def begin(
    comm: Comm, world: Comm, config: TrainConfig, batches: Batches, observers: Sequence[Observer], stack: ExitStack
) -> Run:
    """Make the model on this rank, from the seed or from a checkpoint, and its layout. Every rank of `comm` calls it.

    world: all ranks, also those outside of the layout. observers: are called after every step. stack: is closed when
    the job ends.
    """
    # No other job saves into the same directory while this one runs.
    storage = None if config.save is None else stack.enter_context(checkpoint.saving_alone(comm, config))

    resumed = config.resume and config.save
    job = build(checkpoint.resumed_config(config, batches) if resumed else config, batches, comm)
    job.observers = observers
    strategy = parallelize(job, comm)
    done, losses = checkpoint.resume_job(config.save, job, strategy) if resumed and config.save else (0, [])
    for extension in job.extensions:
        extension.begin(world, strategy, done)
    for extension in job.extensions:
        reading = extension.reading(job.sampler, strategy.axes.dp.rank, strategy.steps_read(done))
        job.sampler = stack.enter_context(reading)
    attached = stack.enter_context(ExitStack())
    return Run(comm, config, job, strategy, done, losses, storage, attached, saved=done, observers=observers)


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


def serve(extension: Extension, comm: Comm, config: TrainConfig, batches: Batches) -> TrainResult:
    """Do, on a rank outside of the layout, what the technique that asked for it does there in place of training."""
    with account_memory() as account, FlopCounter(), xp.quiet_overflow():
        done = extension.serve(comm, config, batches, Job.saved_model)
    peak, measured = dict(account.at_peak), extension.result()
    return TrainResult(comm.rank, [], account.peak, peak, [], "", done, measured=measured)


def digest(strategy: MeshStrategy) -> str:
    """Return a fingerprint of the weights and the optimizer state that this rank holds: equal digests, equal bits."""
    result = hashlib.sha256()
    for array in strategy.local_arrays():
        result.update(array.tobytes())
    for name, arrays in sorted(strategy.optimizer_state().items()):
        for key, array in sorted(arrays.items()):
            result.update(f"{name}.{key}".encode() + array.tobytes())
    return result.hexdigest()
