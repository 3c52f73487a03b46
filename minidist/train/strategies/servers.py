"""`--strategy ps`: training with a parameter server in the place of reductions.

    ranks 0 .. servers-1     hold the weights, each some of the parameters, with the optimizer
    the others               workers: replica w of the data axis computes the micro-batches that replica w of --dp would

A checkpoint is that of any other strategy (weights and optimizer state by name), so a job may go on with or without
servers.

There is no common step: a worker's clock c takes the global batch of step c, and an update gets the learning rate of
its clock. With bsp the updates are those of data parallelism in rank order, and so of one device, bit for bit. With the
others they are what their order made them, and `compare` replays that order on one device
(parallel/parameter_server/server_replay.py).

Volumes, all ranks together, with D bytes of weights, W workers, S servers and T steps:

    startup          (W + S - 1) D                 rank 0's weights to everybody
    parameter_push   W T (D + 16 S)                a gradient, and a head of 16 B for each server; of an embedding that
    is no
                                                   output layer too (Llama's) only the rows of the tokens that occur
                                                   travel, with 8 B a row for its number, and 8 B more in the head
    parameter_pull   W (T - 1) D + (W + S - 1) D   weights after every push but the last; at the end to everybody
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.autograd import FlopCounter
from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.memory import account_memory
from minidist.base.trace import SpanEvent, purpose
from minidist.checkpoint import Checkpoint, Piece, save
from minidist.checkpoint.resume import job_state, same_job
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.config.train_config import Batches, TrainConfig, resolve_batches
from minidist.nn.flat import FlatParameters
from minidist.optim import ParameterSlice
from minidist.parallel import parameter_server as ps
from minidist.parallel.parameter_server.server import Updates
from minidist.planning.volumes import ITEMSIZE, NUMBER, AxisSizes
from minidist.train.job import Job, build, optimizer_class
from minidist.train.recipe import recompute_blocks
from minidist.train.trainer import NonFiniteError, Observer, StepState, TrainResult

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
        self.job, self.comm, self.done = job, comm, 0  # done: steps before a resume
        self.flat = FlatParameters(job.model.parameters())
        self.losses: dict[tuple[int, int], list[float]] = {}
        self.began = 0.0

    def initial(self) -> dict[str, Array]:
        """Copies of the weights that the seed gives."""
        return {p.name: xp.array(p.data) for p in self.flat.parameters}

    def gradient(self, worker: int, clock: int, weights: Mapping[str, Array]) -> dict[str, Any]:
        """Of replica `worker`'s micro-batches of its step, its share of the global mean."""
        job, k, step = self.job, self.job.batches.accumulation, self.done + clock
        self.step_ends(clock)
        for parameter in self.flat.parameters:
            parameter.data[...] = weights[parameter.name]
        self.flat.updated()
        self.flat.zero_grad()
        losses = self.losses[worker, step] = []
        with FlopCounter() as counter:
            for number in range(worker * k, (worker + 1) * k):
                with job.coordinates(step, number):
                    loss = job.loss(step, number)
                    self._computed(counter, "forward")
                    loss.backward()
                    self._computed(counter, "backward")
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise NonFiniteError(f"worker {worker}, step {step}: the loss is {losses[-1]}; lower --lr")
        result: dict[str, Any] = {
            p.name: xp.zeros_like(p.data) if p.grad is None else xp.array(p.grad) for p in self.flat.parameters
        }
        for name in sparse_keys(job.config):
            rows = touched_rows(job, step, worker)
            result[name] = ps.Rows(rows, result[name][rows])
        return result

    def _computed(self, counter: Any, name: str) -> None:
        if self.comm is not None:
            self.comm.compute(counter.take(), name=name)

    def step_ends(self, clock: int) -> None:
        """The span of the step before: its gradient, its push, and the pull after it."""
        if self.comm is not None:
            if clock:
                self.comm.trace.spans.append(
                    SpanEvent(
                        self.comm.rank, "main", f"step {self.done + clock - 1}", self.began, self.comm.time(), "step"
                    )
                )
            self.began = self.comm.time()


def sparse_keys(config: TrainConfig) -> frozenset[str]:
    """Matrices of whose gradient only some rows are not zero: an embedding that is not the output layer too, as GPT's
    is.
    """
    return frozenset({"model.embed_tokens.weight"} if config.model == "llama" else ())


def touched_rows(job: Job, step: int, worker: int) -> Array:
    """The tokens that occur in the worker's rows of a step, in order, each once."""
    k = job.batches.accumulation
    return np.unique(np.concatenate([job.micro_batch(step, worker * k + i)[0].reshape(-1) for i in range(k)])).astype(
        np.int64
    )


def server_config(job: Job, checkpoint: Checkpoint | None = None) -> ps.ServerConfig:
    """The servers that the job's flags describe; checkpoint: what they go on from."""
    kind, settings = optimizer_class(job)
    done = 0 if checkpoint is None else checkpoint.step

    def make(slices: Sequence[ParameterSlice]) -> Any:
        optimizer = kind(slices, **settings)
        if checkpoint is not None:
            load_optimizer(checkpoint, optimizer, slices)
        return optimizer

    config = job.config
    return ps.ServerConfig(
        config.servers,
        config.consistency,
        make,
        sparse_keys(config),
        config.staleness_aware,
        rate=lambda clock: job.schedule(done + clock),
    )


def train_served(
    comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False
) -> TrainResult:
    """`train` of a job with `--strategy ps`; every rank calls it and returns the same losses.

    A step has no one moment here, so observers are told of all steps at the end, when their losses are known
    everywhere.
    """
    result = serve(comm, config, observers, timeline).result
    assert result is not None
    return result


def serve(
    comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False, keep: bool = False
) -> Served:
    """This rank's part of the job, a server's or a worker's. keep: every update and loss, for a comparison."""
    batches = resolve_batches(config, comm.size)
    served = Served()
    with account_memory(timeline) as account, xp.quiet_overflow():
        job = build(config, batches, comm)
        recompute_blocks(job)
        worker = Worker(job, comm)
        sizes = {p.name: p.size for p in worker.flat.parameters}
        checkpoint = load_worker(worker, config.save) if config.resume and config.save else None
        held: list[Updates] = []

        def observe(updates: Updates) -> None:
            held[:] = [updates]
            if keep:
                served.updates.append(snapshot(updates))

        steps = config.steps - worker.done
        run = ps.run(comm, server_config(job, checkpoint), worker.initial(), worker.gradient, steps, observe=observe)
        if worker.losses:
            worker.step_ends(steps)
        losses = [*(checkpoint.state["losses"] if checkpoint else ()), *global_losses(comm, config, batches, worker)]
        if config.save:
            save_served(comm, config.save, job, held, losses)
    everybody: Any = SimpleNamespace(axes=SimpleNamespace(comm=comm))
    for step, loss in enumerate(losses):
        for observer in observers:
            observer(StepState(comm.rank, step, loss, job, everybody))
    served.losses, served.weights = worker.losses, run.weights
    served.result = TrainResult(
        comm.rank,
        losses,
        account.peak,
        dict(account.at_peak),
        [AxisSizes(0, False, [sum(sizes.values())], [], sizes)],
        digest(run.weights),
        worker.done,
    )
    return served


def global_losses(comm: Comm, config: TrainConfig, batches: Batches, worker: Worker) -> list[float]:
    """The loss of each step: its micro-batches' in their global order. Every rank sends its own to all (8 B each,
    metrics).
    """
    steps, number = range(worker.done, config.steps), comm.rank - config.servers
    own = [loss for step in steps for loss in worker.losses.get((number, step), [])]
    counts = [0] * config.servers + [len(steps) * batches.accumulation] * batches.dp
    with purpose("metrics"):
        everybody: Any = all_gather(comm, np.array(own, np.float64), counts=counts)
    table = everybody.reshape(batches.dp, len(steps), batches.accumulation)
    return [ordered_sum(table[:, step].reshape(-1)) for step in range(len(steps))]


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
        optimizer = {
            f"{name}.{key}": np.array(array) for name, arrays in state.items() for key, array in arrays.items()
        }
        optimizer["step_count"] = np.array(updates.optimizer.step_count)
    return {
        "gradients": {piece.name: np.array(piece.grad).reshape(shapes[piece.name]) for piece in updates.slices},
        "weights": {name: np.array(array) for name, array in updates.shard.weights.items()},
        "optimizer": optimizer,
    }


# in a checkpoint
# --------------------------------------------------------------------------------------------------------


def save_served(comm: Comm, directory: str, job: Job, held: Sequence[Updates], losses: list[float]) -> None:
    """Write the job when all steps are done; every rank calls it, and the servers have something to write."""
    pieces, optimizer_steps = [], 0
    for updates in held:
        state = {} if updates.optimizer is None else updates.optimizer.state
        for name, array in updates.shard.weights.items():
            pieces.append(Piece(f"weights/{name}", array.shape, array))
            pieces += [
                Piece(f"optimizer/{name}/{key}", array.shape, values) for key, values in state.get(name, {}).items()
            ]
        optimizer_steps = 0 if updates.optimizer is None else updates.optimizer.step_count
    save(comm, directory, job.config.steps, pieces, job_state(job, job.config.steps, losses, optimizer_steps, {}))


def load_worker(worker: Worker, directory: str) -> Checkpoint:
    """The latest checkpoint's weights into the worker's model. Raises UsageError when it is another job's."""
    checkpoint = Checkpoint(directory)
    same_job(checkpoint, worker.job)
    worker.done = checkpoint.step
    for parameter in worker.flat.parameters:
        parameter.data[...] = checkpoint.tensor(f"weights/{parameter.name}")
    worker.flat.updated()
    return checkpoint


def load_optimizer(checkpoint: Checkpoint, optimizer: Any, slices: Sequence[ParameterSlice]) -> None:
    """The optimizer state of a server's keys."""
    states: dict[str, dict[str, Array]] = {}
    for piece in slices:
        prefix = f"optimizer/{piece.name}/"
        for name in checkpoint.tensors:
            if name.startswith(prefix):
                states.setdefault(piece.name, {})[name[len(prefix) :]] = checkpoint.read(name)
    optimizer.load_state_dict({"step": checkpoint.state["optimizer_steps"], "state": states})


def served_bytes(config: TrainConfig, batches: Batches, sizes: AxisSizes, done: int = 0) -> dict[str, int]:
    """Payload bytes that all ranks together send; see the head of this file. done: steps before a resume.

    What a sparse push sends depends on the data: the tokens of each worker's batches are counted.
    """
    workers, servers, steps, itemsize = batches.dp, config.servers, config.steps - done, ITEMSIZE[config.precision]
    weights, others = sum(sizes.units) * itemsize, workers + servers - 1
    push = workers * steps * (weights + 16 * servers)
    for name in sparse_keys(config):
        job = build(config, batches)
        rows = sum(
            touched_rows(job, step, worker).size for step in range(done, config.steps) for worker in range(workers)
        )
        push += workers * steps * (8 - sizes.parameters[name] * itemsize) + rows * (8 + config.width * itemsize)
    return {
        "metrics": others * workers * steps * batches.accumulation * NUMBER,
        "parameter_pull": workers * (steps - 1) * weights + others * weights,
        "parameter_push": push,
        "startup": others * weights,
    }
