"""`--strategy ps`: training with a parameter server in the place of reductions.

    ranks 0 .. servers-1     hold the weights, each some of the parameters, with the optimizer
    the others               workers: replica w of the data axis computes the micro-batches that replica w of --dp would

There is no common step: a worker's clock c takes the global batch of step c, and an update gets the learning rate of
its clock. With bsp the updates are those of data parallelism in rank order, and so of one device, bit for bit. With the
others they are what their order made them, and `compare` replays that order on one device
(server_replay.py).

This file has what a worker computes, what a server holds, and what both send; the loop is in
`trainer.py`. Volumes, all ranks together, with D bytes of weights, W workers, S servers and T steps:

    startup          (W + S - 1) D                 rank 0's weights to every other rank
    parameter_push   W T (D + 16 S)                a gradient, or the messages of a --compression in its place, and a
                                                   header of 16 B for each server; of an embedding that is not the
                                                   output layer too (Llama's), as it is or in half precision, only the
                                                   rows of the tokens that occur, with 8 B per row for its number, and
                                                   8 B more in the header
    parameter_pull   W (T - 1) D + (W + S - 1) D   weights after every push but the last; at the end to every rank
    metrics          T (W + S - 1) 8 B W k         the losses of k micro-batches of each worker, to every rank
    evaluation       E (W + S - 1) (D + 8 B W k)   E evaluations: weights and such losses to every rank; with batch
                                                   norms also an all-reduce of their running statistics

Proved by: tests/train/test_servers.py
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.flop_counter import FlopCounter
from minidist.base.half import DTYPES, named_dtype
from minidist.base.traces import SpanEvent
from minidist.core.base.arrays import Array
from minidist.core.base.layout import cut
from minidist.core.base.trace import track
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters
from minidist.job.checkpoint.axis_state import check_nothing_is_lost, rank_state_shards, read_rank_state
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard
from minidist.job.config.train_config import Batches
from minidist.job.train.job import Job, build
from minidist.job.train.strategies.data_axis import AxisSizes, Tensors
from minidist.job.train.update import NonFiniteError
from minidist.nn.buffers import named_buffers
from minidist.optim import ParameterSlice
from minidist.techniques import Run, of_job
from minidist.techniques import parameter_server as ps
from minidist.techniques.bucket import ReplicaBucket
from minidist.techniques.parameter_server.server import Updates

# The functions below import it, so that the servers run without this technique.
if TYPE_CHECKING:
    from minidist.techniques.compression.push import PushCompression
    from minidist.techniques.compression.replay import CompressionReplay

CASTS = ("fp16", "bf16")  # the compressions that keep every element
RESIDUAL_PLACE = "residual/stage 0 tile 0"  # where data parallelism saves it, too
NUMBER = 8  # bytes of a loss, and of a row's number


class Worker:
    """Computes gradients for given weights, as a function of (worker, clock, weights): on a rank, and in a replay.

    done: steps made before a resume. losses: of each micro-batch, by (worker, step). buffers: the running statistics of
    the model, by the number of steps after which an evaluation needs them. watching: called after a gradient with the
    number of steps, and the worker's loss scaled to all workers. between(clock): called before the gradient of every
    clock but the first.
    """

    def __init__(
        self,
        job: Job,
        comm: Comm | None = None,
        checkpoint: Checkpoint | None = None,
        watching: Sequence[Callable[[int, float], None]] = (),
        between: Callable[[int], None] | None = None,
    ) -> None:
        self.job, self.comm, self.watching, self.between = job, comm, watching, between
        self.flat = FlatParameters(job.model.parameters())
        self.losses: dict[tuple[int, int], list[float]] = {}
        self.buffers: dict[int, dict[str, Array]] = {}
        self.began = 0.0
        self.done = 0
        self.replays: dict[int, CompressionReplay] = {}
        if checkpoint is not None:
            self.done = checkpoint.step
            for parameter in self.flat.parameters:
                checkpoint.expect(f"weights/{parameter.name}", parameter.shape, str(parameter.dtype))
                parameter.data[...] = checkpoint.tensor(f"weights/{parameter.name}")
            self.flat.updated()

    def initial_weights(self) -> dict[str, Array]:
        """Return copies of the weights that the seed, or the checkpoint, gives."""
        return {p.name: xp.array(p.data) for p in self.flat.parameters}

    def gradient(self, worker: int, clock: int, weights: Mapping[str, Array]) -> dict[str, Any]:
        """Return the gradient of this worker's micro-batches, scaled to its share of the global mean."""
        job, k, step = self.job, self.job.batches.accumulation, self.done + clock
        self.end_step(clock)
        if clock and self.between is not None:
            self.between(clock)

        # The weights that the worker pulled.
        self.load(weights)
        self.flat.zero_grad()

        losses = self.losses[worker, step] = []
        # Forward and backward of its micro-batches, both on the virtual clock.
        with FlopCounter() as flops:
            for number in range(worker * k, (worker + 1) * k):
                batch = job.micro_batch(step, number)
                with job.coordinates(step, number):
                    loss = job.loss(*batch)
                    self._compute(flops, "forward")
                    loss.backward()
                    self._compute(flops, "backward")
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise NonFiniteError(f"worker {worker}, step {step}: the loss is {losses[-1]}; lower --lr")

        for watch in self.watching:
            watch(step + 1, sum(losses) * job.batches.dp)

        if step + 1 in evaluated_steps(job.config, self.done):
            self.buffers[step + 1] = {name: xp.array(array) for name, array in named_buffers(job.model)}
        return self._pushed(step, worker)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Give the model these weights."""
        for parameter in self.flat.parameters:
            parameter.data[...] = weights[parameter.name]
        self.flat.updated()

    def held_out(self, worker: int) -> list[float]:
        """Return the losses of this worker's micro-batches of the held-out batch, with the model's weights."""
        k = self.job.batches.accumulation
        with self.job.evaluating() as held_out:
            return [held_out.loss_at(0, number).item() for number in range(worker * k, (worker + 1) * k)]

    def _pushed(self, step: int, worker: int) -> dict[str, Any]:
        """Return the gradients as they are pushed."""
        result: dict[str, Any] = {
            p.name: track(xp.zeros_like(p.data) if p.grad is None else xp.array(p.grad), "gradient")
            for p in self.flat.parameters
        }
        # One device adds what the servers add.
        if self.comm is None and compression_of(self.job.config) != "none":
            result = self._arrived(result, worker, step)
        # Of a sparse gradient, only the rows of the tokens that occur are sent.
        for name in sparse_keys(self.job.config):
            rows = touched_rows(self.job, step, worker)
            result[name] = ps.Rows(rows, result[name][rows])
        return result

    def _arrived(self, gradient: dict[str, Array], worker: int, step: int) -> dict[str, Array]:
        """Return a worker's gradient as it arrives, compressed; each is asked for once, in the order of the steps."""
        from minidist.techniques.compression.replay import CompressionReplay

        config: Any = self.job.config
        new = CompressionReplay(config.compression, config.seed, self.flat.dtype, config.servers + worker)
        replay, parameters = self.replays.setdefault(worker, new), {p.name: p for p in self.flat.parameters}
        for server, shard in enumerate(ps.make_shards(config.servers, gradient)):
            if shard.keys:
                bucket = ReplicaBucket(0, server, step, [parameters[key] for key in shard.keys], [shard.flat])
                gradient = gradient | shard.views(replay.sum(bucket))
        return gradient

    def _compute(self, flops: FlopCounter, name: str) -> None:
        if self.comm is not None:
            self.comm.compute(flops.take(), name=name)

    def end_step(self, clock: int) -> None:
        """Record the span of the step before `clock`: its gradient, its push, and the pull after it."""
        if self.comm is None:
            return
        if clock:
            name = f"step {self.done + clock - 1}"
            self.comm.trace.add_span(SpanEvent(self.comm.rank, "main", name, self.began, self.comm.time(), "step"))
        done = self.done + clock
        every = self.job.config.every
        saving = "servers save at the end only" if every is None else f"servers save every {every} steps"
        self.comm.world.place = f"step {done}, with {done} of {self.job.config.steps} steps done; {saving}"
        self.began = self.comm.time()


def evaluated_steps(config: Any, done: int) -> range:
    """Return after how many steps a job evaluates that goes on after `done` steps."""
    every = config.evaluate_every
    return range(done // every * every + every, config.steps + 1, every) if every else range(0)


def sparse_keys(config: Any) -> frozenset[str]:
    """Return the matrices with sparse gradients, row by row: an embedding that is not the output layer too.

    A compressor of whole gradients has none: the embedding's gradient is a part of the whole.
    """
    return frozenset({"model.embed_tokens.weight"} if config.model == "llama" and keeps_elements(config) else ())


def compression_of(config: Any) -> str:
    """Return the --compression of a job's gradients, "none" where the technique is not installed."""
    return config.optional("compression") or "none"


def keeps_elements(config: Any) -> bool:
    """Return whether a push has every element of a gradient."""
    return compression_of(config) in ("none", *CASTS)


def push_of(config: Any, done: int = 0) -> "PushCompression | None":
    """Return what compresses the pushes of a job that has made `done` steps, or None."""
    if compression_of(config) == "none":
        return None
    from minidist.techniques.compression.push import PushCompression

    return PushCompression(config.compression, config.seed, done)


def touched_rows(job: Job, step: int, worker: int) -> Array:
    """Return the distinct tokens that occur in the worker's rows of a step, in ascending order."""
    k, again = job.batches.accumulation, replace(job, extensions=())  # the worker has read them before
    tokens = [again.micro_batch(step, worker * k + i)[0].reshape(-1) for i in range(k)]
    return np.unique(xp.concatenate(tokens)).astype(np.int64)


def server_config(job: Job, checkpoint: Checkpoint | None = None) -> ps.ServerConfig:
    """Return the servers that the job's flags describe; checkpoint: whose optimizer state they continue with."""
    kind, settings = job.optimizer()
    done = 0 if checkpoint is None else checkpoint.step

    # Each server makes its own, for its parameters only.
    def make_optimizer(slices: Sequence[ParameterSlice]) -> Any:
        optimizer = kind(slices, **settings)
        if checkpoint is not None:
            load_optimizer(checkpoint, optimizer, slices)
        return optimizer

    config: Any = job.config
    return ps.ServerConfig(
        config.servers,
        config.consistency,
        make_optimizer,
        sparse_keys(config),
        config.staleness_aware,
        rate=lambda clock: job.lr_factor(done + clock),
        clip=job.clip,
        push=push_of(config, done),
    )


def server_tensors(updates: Updates) -> Tensors:
    """Return copies of what a server has after an update: gradients, weights and optimizer state of its keys."""
    # Gradients are flat on a server; a comparison needs them in the shapes of the parameters.
    shapes = updates.shard.shapes
    optimizer: dict[str, Array] = {}
    if updates.optimizer is not None:
        state = updates.optimizer.state
        optimizer = {
            f"{name}.{key}": np.array(array) for name, arrays in state.items() for key, array in arrays.items()
        }
        optimizer["step_count"] = np.array(updates.optimizer.step_count)
    return {
        "gradients": {part.name: np.array(part.grad).reshape(shapes[part.name]) for part in updates.slices},
        "weights": {name: np.array(array) for name, array in updates.shard.weights.items()},
        "optimizer": optimizer,
    }


# --- in a checkpoint: the same as that of any other strategy, so a job may be resumed with or without servers ---------


def checkpoint_shards(updates: Updates) -> list[CheckpointShard]:
    """Return what a server writes: the weights and the optimizer state of its keys."""
    shards = []
    state = {} if updates.optimizer is None else updates.optimizer.state
    for name, array in updates.shard.weights.items():
        shards.append(CheckpointShard(f"weights/{name}", array.shape, array))
        for key, values in state.get(name, {}).items():
            shards.append(CheckpointShard(f"optimizer/{name}/{key}", array.shape, values))
    return shards


def push_shards(worker: Worker, number: int, push: "PushCompression") -> list[CheckpointShard]:
    """Return what worker `number` writes: what it has not pushed yet, and its Q of PowerSGD."""
    residual, queries = push.state()
    shards = [CheckpointShard(f"queries/{number:05d}/{key}", query.shape, query) for key, query in queries.items()]
    if residual:
        flat = xp.concatenate([residual[name].reshape(-1) for name in worker.flat.names])
        shards += rank_state_shards(number, {RESIDUAL_PLACE: flat})
    return shards


def load_pushes(checkpoint: Checkpoint, worker: Worker, number: int, push: "PushCompression | None") -> None:
    """Let worker `number` go on with what `push_shards` of it, or data parallelism, has saved."""
    feedback = push is not None and push.error_feedback
    check_nothing_is_lost(checkpoint, {f"local/{RESIDUAL_PLACE}"} if feedback else set())
    if push is None:
        return
    flat, whole = read_rank_state(checkpoint, RESIDUAL_PLACE, number, worker.job.batches.dp), worker.flat
    if flat is not None:
        push.residual = dict(zip(whole.names, cut(flat, [p.size for p in whole.parameters]), strict=True))
    prefix = f"queries/{number:05d}/"
    keys = [name for name in checkpoint.tensors if name.startswith(prefix)]
    push.queries = {name[len(prefix) :]: checkpoint.tensor(name) for name in keys}


def load_optimizer(checkpoint: Checkpoint, optimizer: Any, slices: Sequence[ParameterSlice]) -> None:
    """Load the optimizer state of a server's keys."""
    states: dict[str, dict[str, Array]] = {}
    for part in slices:
        prefix = f"optimizer/{part.name}/"
        for name in checkpoint.tensors:
            if name.startswith(prefix):
                states.setdefault(part.name, {})[name[len(prefix) :]] = checkpoint.read(name)
    optimizer.load_state_dict({"step": checkpoint.state["optimizer_steps"], "state": states})


# --- volumes ----------------------------------------------------------------------------------------------------------


def compressed_bytes(config: Any, job: Job) -> int:
    """Return the bytes of one worker's compressed gradient for all servers."""
    shards = ps.make_shards(config.servers, {p.name: p.data for p in job.model.parameters()})
    ps.compress_pushes(shards, push_of(config), SimpleNamespace(rank=0, size=1))
    return sum(n * np.dtype(dtype).itemsize for shard in shards for n, dtype in shard.wire)


def parameter_server_bytes(config: Any, batches: Batches, sizes: AxisSizes, done: int = 0) -> dict[str, int]:
    """Return the payload bytes that all ranks together send; see the head of this file. done: steps before a resume.

    What a sparse push sends depends on the data: the tokens of each worker's batches are counted.
    """
    workers, servers, steps = batches.dp, config.servers, config.steps - done
    itemsize = named_dtype(DTYPES[config.precision]).itemsize
    elements = sum(sizes.units)
    pushed = 2 if compression_of(config) in CASTS else itemsize
    gradient = elements * pushed if keeps_elements(config) else compressed_bytes(config, build(config, batches))
    weights, others = elements * itemsize, workers + servers - 1
    losses = others * workers * batches.accumulation * NUMBER
    sent = {
        "parameter_pull": workers * (steps - 1) * weights + others * weights,
        "parameter_push": workers * steps * (gradient + 2 * NUMBER * servers),
        "startup": others * weights,
        "metrics": steps * losses,
    }
    for name in sparse_keys(config):
        job = build(config, batches)
        rows = sum(
            touched_rows(job, step, worker).size for step in range(done, config.steps) for worker in range(workers)
        )
        # In place of the dense matrix: its rows, each with its number, and one more number in the header.
        dense = sizes.parameters[name] * pushed
        sent["parameter_push"] += workers * steps * (NUMBER - dense) + rows * (NUMBER + config.width * pushed)
    if evaluations := len(evaluated_steps(config, done)):
        # The weights to every other rank, the losses, and the all-reduce of the running statistics.
        copies = others * (weights + 2 * 2 * sum(sizes.norms) * NUMBER)
        passes = 1 + sum(extension.evaluations for extension in of_job(config))
        sent["evaluation"] = evaluations * (copies + passes * losses)
    # All steps are done at the end, and some with every checkpoint before it.
    saves = (config.steps - 1) // config.every - done // config.every if config.save and config.every else 0
    run = Run(
        config, batches, workers + servers, steps, done, saves + 1, [[sizes]], itemsize, [(batches.shares, steps)]
    )
    total = Counter(sent)
    for extension in of_job(config):
        total.update(extension.bytes_sent(run))
    return dict(total)
