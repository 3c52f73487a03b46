"""`--strategy ps`: training with a parameter server in the place of reductions.

    ranks 0 .. servers-1     hold the weights, each some of the parameters, with the optimizer
    the others               workers: replica w of the data axis computes the micro-batches that replica w of --dp would

There is no common step: a worker's clock c takes the global batch of step c, and an update gets the learning rate of its
clock. With bsp the updates are those of data parallelism in rank order, and so of one device, bit for bit. With the others
they are what their order made them, and `compare` replays that order on one device (parallel/parameter_server/replay.py).

Volumes, all ranks together, with D bytes of weights, W workers, S servers and T steps:

    startup          (W + S - 1) D                 rank 0's weights to everybody
    parameter_push   W T (D + 16 S)                a gradient, and a head of 16 B for each server
    parameter_pull   W (T - 1) D + (W + S - 1) D   weights after every push but the last; at the end to everybody
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.autograd import Meter
from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.memory import account_memory
from minidist.base.random import batch_coordinates
from minidist.base.trace import SpanEvent, purpose
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.nn.flat import FlatParameters
from minidist.parallel import parameter_server as ps
from minidist.parallel.parameter_server.server import Updates
from minidist.train.config import Batches, TrainConfig, resolve_batches
from minidist.train.job import Job, build, optimizer_class
from minidist.train.recipe import recompute_blocks
from minidist.train.trainer import NonFiniteError, Observer, StepState, TrainResult
from minidist.train.volumes import ITEMSIZE, NUMBER, AxisSizes

Snapshot = dict[str, dict[str, Array]]  # "gradients", "weights", "optimizer" -> name -> values


@dataclass
class Served:
    """What a rank kept for a comparison. updates: of a server, its keys after each one. losses: by (worker, clock), of
    each micro-batch. weights: the final ones."""

    updates: list[Snapshot] = field(default_factory=list)
    losses: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)
    result: TrainResult | None = None


class Worker:
    """Computes gradients for given weights, as a function of (worker, clock, weights): on a rank, and in a replay."""

    def __init__(self, job: Job, comm: Comm | None = None) -> None:
        self.job, self.comm = job, comm
        self.flat = FlatParameters(job.model.parameters())
        self.losses: dict[tuple[int, int], list[float]] = {}
        self.began = 0.0

    def initial(self) -> dict[str, Array]:
        """Copies of the weights that the seed gives."""
        return {p.name: xp.array(p.data) for p in self.flat.parameters}

    def gradient(self, worker: int, clock: int, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Of replica `worker`'s micro-batches of step `clock`, its share of the global mean."""
        job, k = self.job, self.job.batches.accumulation
        self.step_ends(clock)
        for parameter in self.flat.parameters:
            parameter.data[...] = weights[parameter.name]
        self.flat.updated()
        self.flat.zero_grad()
        losses = self.losses[worker, clock] = []
        with Meter() as meter:
            for number in range(worker * k, (worker + 1) * k):
                with batch_coordinates(clock, number * job.batches.micro_batch, job.config.seed):
                    loss = job.loss(clock, number)
                    self._computed(meter, "forward")
                    loss.backward()
                    self._computed(meter, "backward")
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise NonFiniteError(f"worker {worker}, step {clock}: the loss is {losses[-1]}; lower --lr")
        return {p.name: xp.zeros_like(p.data) if p.grad is None else xp.array(p.grad) for p in self.flat.parameters}

    def _computed(self, meter: Any, name: str) -> None:
        if self.comm is not None:
            self.comm.compute(meter.take(), name=name)

    def step_ends(self, clock: int) -> None:
        """The span of the step before: its gradient, its push, and the pull after it."""
        if self.comm is not None:
            if clock:
                self.comm.trace.spans.append(SpanEvent(self.comm.rank, "main", f"step {clock - 1}", self.began, self.comm.time(), "step"))
            self.began = self.comm.time()


def server_config(job: Job) -> ps.ServerConfig:
    """The servers that the job's flags describe."""
    kind, settings = optimizer_class(job)
    config = job.config
    return ps.ServerConfig(
        config.servers, config.consistency, lambda slices: kind(slices, **settings), staleness_aware=config.staleness_aware,
        rate=job.schedule,
    )  # fmt: skip


def train_served(comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False) -> TrainResult:
    """`train` of a job with `--strategy ps`; every rank calls it and returns the same losses.

    A step has no one moment here, so observers are told of all steps at the end, when their losses are known everywhere.
    """
    result = serve(comm, config, observers, timeline).result
    assert result is not None
    return result


def serve(comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False, keep: bool = False) -> Served:
    """This rank's part of the job, a server's or a worker's. keep: every update and loss, for a comparison."""
    batches = resolve_batches(config, comm.size)
    served = Served()
    with account_memory(timeline) as account, xp.quiet_overflow():
        job = build(config, batches, comm)
        recompute_blocks(job)
        worker = Worker(job, comm)
        sizes = {p.name: p.size for p in worker.flat.parameters}

        def observe(updates: Updates) -> None:
            served.updates.append(snapshot(updates))

        run = ps.run(comm, server_config(job), worker.initial(), worker.gradient, config.steps, observe=observe if keep else None)
        if worker.losses:
            worker.step_ends(config.steps)
        losses = global_losses(comm, config, batches, worker.losses)
    everybody: Any = SimpleNamespace(axes=SimpleNamespace(comm=comm))
    for step, loss in enumerate(losses):
        for observer in observers:
            observer(StepState(comm.rank, step, loss, job, everybody))
    served.losses, served.weights = worker.losses, run.weights
    served.result = TrainResult(
        comm.rank, losses, account.peak, dict(account.at_peak),
        [AxisSizes(0, False, [sum(sizes.values())], [], sizes)], digest(run.weights),
    )  # fmt: skip
    return served


def global_losses(comm: Comm, config: TrainConfig, batches: Batches, mine: Mapping[tuple[int, int], list[float]]) -> list[float]:
    """The loss of each step: its micro-batches' in their global order. Every rank sends its own to all (8 B each, metrics)."""
    own = [loss for clock in range(config.steps) for loss in mine.get((comm.rank - config.servers, clock), [])]
    counts = [0] * config.servers + [config.steps * batches.accumulation] * batches.dp
    with purpose("metrics"):
        everybody: Any = all_gather(comm, np.array(own, np.float64), counts=counts)
    table = everybody.reshape(batches.dp, config.steps, batches.accumulation)
    return [ordered_sum(table[:, step].reshape(-1)) for step in range(config.steps)]


def ordered_sum(values: Array) -> float:
    """((a + b) + c) + ..."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def digest(weights: Mapping[str, Array]) -> str:
    """A fingerprint of the final weights, which every rank has."""
    result = hashlib.sha256()
    for name in sorted(weights):
        result.update(np.ascontiguousarray(weights[name]).tobytes())
    return result.hexdigest()


def snapshot(updates: Updates) -> Snapshot:
    """Copies of what a server has after an update: gradients, weights and optimizer state of its keys."""
    shapes = updates.shard.shapes
    optimizer: dict[str, Array] = {}
    if updates.optimizer is not None:
        state = updates.optimizer.state
        optimizer = {f"{name}.{key}": np.array(array) for name, arrays in state.items() for key, array in arrays.items()}
        optimizer["step_count"] = np.array(updates.optimizer.step_count)
    return {
        "gradients": {piece.name: np.array(piece.grad).reshape(shapes[piece.name]) for piece in updates.slices},
        "weights": {name: np.array(array) for name, array in updates.shard.weights.items()},
        "optimizer": optimizer,
    }


def served_bytes(config: TrainConfig, batches: Batches, elements: int) -> dict[str, int]:
    """Payload bytes that all ranks together send; see the head of this file."""
    workers, servers, steps = batches.dp, config.servers, config.steps
    weights, others = elements * ITEMSIZE[config.precision], workers + servers - 1
    return {
        "metrics": others * workers * steps * batches.accumulation * NUMBER,
        "parameter_pull": workers * (steps - 1) * weights + others * weights,
        "parameter_push": workers * steps * (weights + 16 * servers),
        "startup": others * weights,
    }
