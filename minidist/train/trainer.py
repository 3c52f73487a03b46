"""The training loop, as a function of a communicator: alone, simulated and under mpiexec it is this very code.

for each step
    1 for each of this rank's micro-batches: forward, backward (gradients travel while backward runs)
    2 the loss of the step, summed over all micro-batches in their global order
    3 (float16: unscale, overflow agreed,) clip, learning rate, optimizer step
    4 observers look at loss, gradients, weights and optimizer state
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.autograd import FlopCounter
from minidist.base import arrays as xp
from minidist.base.errors import MinidistError
from minidist.base.exponents import count_exponents
from minidist.base.memory import account_memory
from minidist.base.trace import SpanEvent, purpose
from minidist.checkpoint.resume import resume_job, save_job
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.data import BatchesAhead, microbatch_numbers
from minidist.equality.replica_check import check_replicas
from minidist.planning.volumes import AxisSizes
from minidist.train.evaluate import evaluate, in_order
from minidist.train.job import Job, build
from minidist.train.noise import NoiseMeter
from minidist.train.recipe import parallelize
from minidist.train.strategies.base import Strategy

TIMELINE_STEPS, TIMELINE_RANKS = (
    3,
    8,
)  # of whose memory the trace tells every event; all steps after the second are alike


class NonFiniteError(MinidistError):
    """The loss became NaN or infinite."""

    exit_code = 2


@dataclass
class StepState:
    """What an observer sees after a step, before the gradients are forgotten."""

    rank: int
    step: int
    loss: float
    job: Job
    strategy: Strategy
    held_out_loss: float | None = None  # in the steps in which it was computed


Observer = Callable[[StepState], None]


@dataclass
class TrainResult:
    """One rank's outcome. `peak_bytes`: most bytes alive at once (parameters, gradients, optimizer, activations, ...)."""

    rank: int
    losses: list[float]
    peak_bytes: int
    peak_by_purpose: dict[str, int]
    sizes: list[AxisSizes]
    digest: str
    first_step: int = 0  # after a resume, the number of steps that were done before
    loss_scale: dict[str, float] | None = (
        None  # float16: the scale after the last step, and how many steps were skipped
    )
    gradient_exponents: dict[str, int] = field(default_factory=dict)  # of the last step, unscaled: see base.exponents
    host: dict[str, int] | None = None  # offloading: most bytes on the host, and the bytes that crossed each way
    noise_scale: dict[str, float | None] | None = None  # of the gradient: see train/noise.py
    held_out: dict[int, float] = field(default_factory=dict)  # steps done -> loss on data that is never trained on


def train(comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False) -> TrainResult:
    """Train on all ranks of `comm`, laid out as `recipe.parallelize` does.

    What each rank sends is in `planning/volumes.py` in closed form; in every case its micro-batches' losses (8 B each,
    purpose metrics), and at the start the first rank of the data axis sends the weights (purpose startup). timeline:
    write the account of memory over time into the trace, of the first steps and ranks.
    """
    if config.strategy == "ps":
        from minidist.train.strategies.servers import train_served  # it is made of what stands here

        return train_served(comm, config, observers, timeline)
    batches = resolve_batches(config, comm.size)
    # An overflow is not a warning a step but one error, from `finish_step`.
    clock = comm.time if timeline and comm.rank < TIMELINE_RANKS else None
    with account_memory(clock=clock) as account, FlopCounter() as counter, xp.quiet_overflow(), ExitStack() as stack:
        job = build(config, batches, comm)
        strategy = parallelize(job, comm)
        done, losses = resume_job(config.save, job, strategy) if config.resume and config.save else (0, [])
        if config.prefetch_batches:
            job.sampler = stack.enter_context(batches_ahead(job, strategy.axes.dp.rank, done))
        noise = NoiseMeter(strategy) if config.noise_scale else None
        held_out: dict[int, float] = {}
        skipped_before, scale = job.scaler.skipped if job.scaler else 0, 1.0
        for step in range(done, config.steps):
            began, scale = comm.time(), job.scaler.scale if job.scaler else 1.0
            strategy.zero_grad()
            losses.append(global_loss(strategy.axes.data, strategy.forward_backward(step)))
            if noise is not None:
                noise.measure()
            finish_step(job, strategy, step, losses[-1])
            if config.check_replicas:
                check_replicas(strategy, step)
            comm.compute(counter.take(), name="optimizer")
            comm.trace.spans.append(SpanEvent(comm.rank, "main", f"step {step}", began, comm.time(), "step"))
            if clock is not None and step + 1 - done == min(TIMELINE_STEPS, config.steps - done):
                account.stop()
                comm.trace.memory.extend(account.samples())
            if config.evaluate_every and (step + 1) % config.evaluate_every == 0:
                held_out[step + 1] = evaluate(job, strategy)
                comm.compute(counter.take(), name="evaluation")
            for observer in observers:
                observer(StepState(comm.rank, step, losses[-1], job, strategy, held_out.get(step + 1)))
            if config.save and (step + 1 == config.steps or (config.every and (step + 1) % config.every == 0)):
                save_job(comm, config.save, job, strategy, step + 1, losses)
        scaler, exponents = job.scaler, count_exponents(strategy.gradients(), scale)
        return TrainResult(
            comm.rank,
            losses,
            account.peak,
            dict(account.at_peak),
            [axis.sizes() for axis in strategy.data_axes],
            digest(strategy),
            done,
            None if scaler is None else {"scale": scaler.scale, "skipped": scaler.skipped - skipped_before},
            exponents,
            (
                None
                if job.pool is None
                else {"peak": job.pool.account.peak, "to_host": job.pool.to_host, "to_device": job.pool.to_device}
            ),
            None if noise is None else noise.result(),
            held_out,
        )


def batches_ahead(job: Job, replica: int, done: int) -> Any:
    """The job's sampler, served by a thread in the order in which this replica trains from step `done` on."""
    size, numbers = job.batches.micro_batch, microbatch_numbers(replica, job.batches.accumulation)
    requests = ((step, number * size, size) for step in range(done, job.config.steps) for number in numbers)
    return BatchesAhead(job.sampler, requests, job.config.prefetch_batches)


def digest(strategy: Strategy) -> str:
    """A fingerprint of the weights and the optimizer state that this rank holds: equal digests, equal bits."""
    result = hashlib.sha256()
    for array in strategy.local_arrays():
        result.update(np.ascontiguousarray(array).tobytes())
    for name, arrays in sorted(strategy.optimizer.state.items()):
        for key, array in sorted(arrays.items()):
            result.update(f"{name}.{key}".encode() + np.ascontiguousarray(array).tobytes())
    return result.hexdigest()


def global_loss(comm: Comm, mine: list[float]) -> float:
    """2: the sum of all micro-batches' losses in their global order, so that every rank has the same digits."""
    with purpose("metrics"):
        everybody = all_gather(comm, np.array(mine, dtype=np.float64))
    return in_order(everybody.tolist())  # type: ignore[union-attr]


def finish_step(job: Job, strategy: Strategy, step: int, loss: float) -> None:
    """3: the same on every rank and on one device.

    In float16: unscale, overflow agreed on over all axes, clip, step. With an overflow anywhere nobody steps.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {step}: the loss is {loss}; {_first_non_finite(strategy)}; lower --lr or clip the gradient"
            " (--clip 1)"
        )
    if job.scaler is not None:
        scale, overflow = job.scaler.scale, strategy.overflow()
        job.scaler.update(overflow)
        if overflow:
            return
        strategy.unscale(1 / scale)
    if job.config.clip is not None:
        strategy.clip(job.config.clip)
    strategy.step(job.schedule(step))


def _first_non_finite(strategy: Strategy) -> str:
    tensors = strategy.tensors()
    for name, array in tensors["weights"].items():
        if not np.isfinite(array).all():
            return f"the first parameter with a value that is not finite is {name!r}"
    for name, array in tensors["gradients"].items():
        if not np.isfinite(array).all():
            return f"all parameters are finite, the first gradient that is not is that of {name!r}"
    return "all parameters and gradients are finite, so it comes from the data or the loss"
