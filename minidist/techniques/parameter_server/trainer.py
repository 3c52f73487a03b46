"""The loop of `--strategy ps`: servers and workers run until all pushes are made, and observers are told afterwards.

It is separate from `trainer.train`, because there is no moment at which all ranks have made the same step.

With `--evaluate-every` the held-out loss is that of the weights after each multiple of that many steps. A server copies
its weights when it has made the updates of such a step, and a worker its running statistics when it begins the next
one. The losses are computed after the last push, so that no message of an evaluation changes the order of the updates:

    servers   copy after N, 2N, ... steps     [1] every copy to all ranks     [3] the sum in the global order
    workers   train                           [2] the loss of own micro-batches

With bsp the weights are those of one device after N steps. With the other consistencies they are what every server has
after N updates, or after N pushes of each worker. The copies of one evaluation need the memory of one model.

Proved by: tests/train/test_servers.py
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import account_memory
from minidist.core.base.arrays import Array
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import all_gather, all_reduce, broadcast
from minidist.core.comm import Comm
from minidist.core.train.task import ordered_sum
from minidist.job.checkpoint.buffers import buffer_shards, load_buffers
from minidist.job.checkpoint.directory import Checkpoint, save
from minidist.job.checkpoint.held import ReplicaId
from minidist.job.checkpoint.resume import job_state, keep_last, load_extensions, same_job, saving_alone
from minidist.job.checkpoint.storage import Storage
from minidist.job.config.train_config import resolve_batches
from minidist.job.train.evaluate import evaluations
from minidist.job.train.job import Job, build
from minidist.job.train.progress import Progress
from minidist.job.train.state import Observer, StepEnd, StepState, TrainResult
from minidist.job.train.strategies.data_axis import AxisSizes, Tensors
from minidist.nn.buffers import named_buffers
from minidist.parallel.running_statistics import batch_norms
from minidist.techniques import Moment, history
from minidist.techniques import parameter_server as ps
from minidist.techniques.compression.push import PushCompression
from minidist.techniques.parameter_server.ranks import (
    Worker,
    checkpoint_shards,
    evaluated_steps,
    load_pushes,
    push_shards,
    server_config,
    server_tensors,
)
from minidist.techniques.parameter_server.server import Updates

HeldOut = Mapping[int, Mapping[str, float]]  # the losses on held-out data, by steps done and by name


@dataclass
class ServedJob:
    """A rank's result, with what a comparison needs.

    updates: of a server, its tensors after each update. losses: by (worker, step), of each micro-batch. weights: the
    final ones.
    """

    result: TrainResult
    weights: dict[str, Array]
    losses: dict[tuple[int, int], list[float]]
    updates: list[Tensors] = field(default_factory=list)


@dataclass
class UpdateRecord:
    """What a server notes of its updates; `per_step` of them make a step. keep: the tensors of every update.

    done: steps made before a resume. evaluated: after how many steps there is an evaluation. ends: of each step. last:
    the last update, whose tensors are the checkpoint's. kept: the tensors. copies: of the weights, by steps done.
    """

    comm: Comm
    per_step: int
    keep: bool
    done: int
    evaluated: Collection[int]
    ends: list[StepEnd] = field(default_factory=list)
    last: list[Updates] = field(default_factory=list)
    kept: list[Tensors] = field(default_factory=list)
    copies: dict[int, ps.Weights] = field(default_factory=dict)

    def observe(self, updates: Updates) -> None:
        """Note an update."""
        if updates.version % self.per_step == 0:
            self.ends.append(StepEnd.now(self.comm))
            done, weights = self.done + updates.version // self.per_step, updates.shard.weights
            if done in self.evaluated:
                self.copies[done] = {key: track(xp.array(array), "parameter") for key, array in weights.items()}
        self.last[:] = [updates]
        if self.keep:
            self.kept.append(server_tensors(updates))


def run_parameter_server(comm: Comm, config: Any, observers: Sequence[Observer] = (), keep: bool = False) -> ServedJob:
    """Run this rank's part of the job, a server's or a worker's; every rank calls it and returns the same losses.

    Observers see this run's steps at the end, when their losses are known on every rank; a Progress of a worker shows
    the steps of that worker while it works. keep: keep the tensors of every update, for a comparison.
    """
    batches = resolve_batches(config, comm.size)
    # A whole clock is one update, or each worker's push is one.
    per_step = 1 if ps.parse_consistency(config.consistency).aggregate else batches.dp
    with account_memory() as account, xp.quiet_overflow(), ExitStack() as stack:
        storage = stack.enter_context(saving_alone(comm, config))

        # The model, from the seed or from a checkpoint.
        job = build(config, batches, comm)
        for extension in job.extensions:
            extension.layers_split(job, None)
        checkpoint = _resumed(job, comm)
        losses: list[float] = list(checkpoint.state["losses"]) if checkpoint else []
        done = len(losses)
        noted = UpdateRecord(comm, per_step, keep, done, evaluated_steps(config, done))

        def finish(steps: range) -> None:
            losses.extend(_global_losses(comm, worker, steps))
            _updated(comm, job, steps)

        # With bsp a moment lies between two steps: every worker has the weights of a clock, and none has pushed.
        def between(clock: int) -> None:
            if config.save and config.every and (done + clock) % config.every == 0 and done + clock < config.steps:
                finish(range(len(losses), done + clock))
                _save(comm, worker, servers.push, noted, losses, storage)

        servers = server_config(job, checkpoint)
        bars = [observer.working for observer in observers if isinstance(observer, Progress)]
        worker = Worker(job, comm, checkpoint, bars, between)
        if checkpoint is not None and comm.rank >= config.servers:
            load_pushes(checkpoint, worker, comm.rank - config.servers, servers.push)
        # A worker is a replica, and reads the batches that the replica of the same number would read.
        for extension in job.extensions if comm.rank >= config.servers else ():
            reading = extension.reading(job.sampler, comm.rank - config.servers, range(worker.done, config.steps))
            job.sampler = stack.enter_context(reading)

        # Push and pull until every worker has made its steps.
        steps = config.steps - worker.done
        run = ps.run(
            comm, servers, worker.initial_weights(), worker.gradient, steps, observe=noted.observe, between=between
        )
        if worker.losses:
            worker.end_step(steps)  # closes the span of the worker's last step

        # The steps' losses are known now that all workers have finished.
        finish(range(len(losses), config.steps))
        if config.save:
            _save(comm, worker, servers.push, noted, losses, storage)
        held_out = held_out_losses(comm, worker, run.weights, noted.copies)

    _show(observers, job, losses, held_out, noted)
    peak, sizes = dict(account.at_peak), [_sizes(worker)]
    result = TrainResult(comm.rank, losses, account.peak, peak, sizes, _digest(run.weights), done)
    result.held_out = {step: found["held_out_loss"] for step, found in held_out.items()}
    return ServedJob(result, run.weights, worker.losses, noted.kept)


def _sizes(worker: Worker) -> AxisSizes:
    """Return the element counts of the model, which every worker has whole."""
    sizes = {p.name: p.size for p in worker.flat.parameters}
    norms = tuple(layer.weight.size for layer in batch_norms(worker.job.model))
    return AxisSizes(0, False, [sum(sizes.values())], [], sizes, norms=norms)


def _show(
    observers: Sequence[Observer], job: Job, losses: Sequence[float], held_out: HeldOut, noted: UpdateRecord
) -> None:
    """Let observers see the steps of this run in order, as those of the training loop do."""
    for step in range(noted.done, len(losses)):
        end = noted.ends[step - noted.done] if noted.ends else None
        for observer in observers:
            found = held_out.get(step + 1, {})
            observer(StepState(noted.comm.rank, step, losses[step], job, None, found, noted.comm, end))


def _resumed(job: Job, comm: Comm) -> Checkpoint | None:
    """Return the checkpoint that the job goes on from, with the state of its techniques and its buffers loaded."""
    config: Any = job.config
    if not config.resume or not config.save:
        return None
    checkpoint = Checkpoint(config.save, step=history(config).from_step)
    load_extensions(job, same_job(checkpoint, job, comm.rank), checkpoint)
    load_buffers(checkpoint, job.model)
    return checkpoint


def _global_losses(comm: Comm, worker: Worker, steps: range) -> list[float]:
    """Return the loss of each of these steps: the sum of its micro-batches' losses in their global order.

    Every worker sends its own to all ranks (8 B each, purpose metrics).
    """
    config: Any = worker.job.config
    batches = worker.job.batches
    number = comm.rank - config.servers
    own = [loss for step in steps for loss in worker.losses.get((number, step), [])]
    # Servers have no losses.
    counts = [0] * config.servers + [len(steps) * batches.accumulation] * batches.dp
    with purpose("metrics"):
        losses: Any = all_gather(comm, np.array(own, np.float64), counts=counts)
    # (replica, step, micro-batch)
    table = losses.reshape(batches.dp, len(steps), batches.accumulation)
    return [ordered_sum(table[:, step].reshape(-1).tolist()) for step in range(len(steps))]


def _updated(comm: Comm, job: Job, steps: range) -> None:
    """Tell the extensions that all workers have made these steps."""
    for extension in job.extensions:
        extension.before_step(len(steps) * job.batches.global_batch)
        extension.after_update(Moment(comm, steps, None))


def _save(
    comm: Comm, worker: Worker, push: PushCompression | None, noted: UpdateRecord, losses: list[float], storage: Storage
) -> None:
    """Write the job after the steps that have losses; every rank calls it.

    Servers write weights and optimizer state, and workers what they have not pushed yet.
    """
    job = worker.job
    config: Any = job.config
    shards = [shard for updates in noted.last for shard in checkpoint_shards(updates)]
    if push is not None and comm.rank >= config.servers:
        shards += push_shards(worker, comm.rank - config.servers, push)
    replica = ReplicaId(comm.rank, comm.size)
    with purpose("checkpoint"):
        shards += buffer_shards((name, array, replica) for name, array in mean_buffers(comm, job).items())
    optimizer_steps = 0
    for updates in noted.last:
        optimizer_steps = 0 if updates.optimizer is None else updates.optimizer.step_count
    # Rank 0 is a server and writes the state.
    state = job_state(job, len(losses), losses, optimizer_steps, {}) if comm.rank == 0 else {}
    save(comm, config.save, len(losses), shards, state, storage)
    keep_last(comm, config.save, history(job.config).keep, losses, storage)


def _digest(weights: Mapping[str, Array]) -> str:
    """Return a fingerprint of the final weights, which every rank has."""
    result = hashlib.sha256()
    for name in sorted(weights):
        result.update(weights[name].tobytes())
    return result.hexdigest()


def held_out_losses(
    comm: Comm, worker: Worker, final: ps.Weights, copies: Mapping[int, ps.Weights]
) -> dict[int, dict[str, float]]:
    """Return the losses on held-out data by name, by steps done. Every rank calls it; the model changes.

    final: the weights at the end. copies: of a server, its keys' weights by steps done. Sends, with purpose evaluation,
    the copies and every worker's losses (8 B each) to all other ranks, and an all-reduce of the running statistics.
    """
    job, result = worker.job, {}
    config: Any = job.config
    shards = ps.make_shards(config.servers, final)
    for done in evaluated_steps(config, worker.done):
        with purpose("evaluation", whole=True), FlopCounter() as flops:
            # [1] The weights of all servers, and the mean of the workers' statistics.
            for server, shard in enumerate(shards):
                for key, weight in copies.get(done, {}).items() if comm.rank == server else ():
                    shard.weights[key][...] = weight
                broadcast(comm, shard.flat, server)
            worker.load({key: value for shard in shards for key, value in shard.weights.items()})
            job.model.load_state_dict(mean_buffers(comm, job, worker.buffers.get(done)), strict=False)
            # [2], [3]
            result[done] = evaluations(job, done, lambda: _loss(comm, worker))
        comm.compute(flops.take(), name="evaluation")
    return result


def _loss(comm: Comm, worker: Worker) -> float:
    """Return the mean loss of the held-out batch: the micro-batches of all workers, in their global order."""
    config: Any = worker.job.config
    batches = worker.job.batches
    own = worker.held_out(comm.rank - config.servers) if comm.rank >= config.servers else []
    counts = [0] * config.servers + [batches.accumulation] * batches.dp
    losses: Any = all_gather(comm, np.array(own, np.float64), counts=counts)
    return ordered_sum(losses.tolist())


def mean_buffers(comm: Comm, job: Job, own: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return the mean of the workers' running statistics of batch normalisation: each worker saw its own rows.

    own: of this rank; None: as they are now. Every rank calls it; an all-reduce of 8 B per number.
    """
    config: Any = job.config
    own = dict(named_buffers(job.model)) if own is None else own
    if not own:
        return {}
    words = xp.concatenate(list(own.values())) * (comm.rank >= config.servers)
    all_reduce(comm, words)
    ends = accumulate(array.size for array in own.values())
    means = (words[end - array.size : end] / job.batches.dp for array, end in zip(own.values(), ends, strict=True))
    return dict(zip(own, means, strict=True))
