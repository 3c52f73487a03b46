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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import account_memory
from minidist.core.base.arrays import Array
from minidist.core.base.layout import cut
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
from minidist.job.train.job import build
from minidist.job.train.progress import Progress
from minidist.job.train.state import Observer, StepEnd, StepState, TrainResult
from minidist.job.train.strategies.data_axis import AxisSizes, Tensors
from minidist.nn.buffers import named_buffers
from minidist.parallel.running_statistics import batch_norms
from minidist.techniques import Moment, history
from minidist.techniques import parameter_server as ps
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


@dataclass
class ServedJob:
    """A rank's result, with what a comparison needs.

    updates: of a server, its tensors after each update. losses: by (worker, step), of each micro-batch. weights: the
    final ones.
    """

    result: TrainResult
    weights: dict[str, Array]
    losses: dict[tuple[int, int], list[float]]
    updates: list[Tensors]


class ServedRank:
    """This rank's part of the job, a server's or a worker's, with what it notes of the steps.

    number: of the worker; negative on a server. done: steps made before a resume. losses: of all steps. per_step:
    updates of a server that make a step. ends: of each step, on a server. last: a server's last update, whose tensors
    are the checkpoint's. kept: its tensors after each update; None where no comparison needs them. copies: of its
    weights, by the steps done at an evaluation.
    """

    def __init__(self, comm: Comm, config: Any, storage: Storage, bars: Sequence[Callable[..., None]]) -> None:
        self.comm, self.config, self.storage, self.number = comm, config, storage, comm.rank - config.servers
        self.batches = resolve_batches(config, comm.size)
        # A whole clock is one update, or each worker's push is one.
        self.per_step = 1 if ps.parse_consistency(config.consistency).aggregate else self.batches.dp

        # The model, from the seed or from a checkpoint.
        self.job = build(config, self.batches, comm)
        for extension in self.job.extensions:
            extension.layers_split(self.job, None)
        checkpoint = self._resumed()
        self.losses: list[float] = list(checkpoint.state["losses"]) if checkpoint else []
        self.done = len(self.losses)
        self.servers = server_config(self.job, checkpoint)
        self.worker = Worker(self.job, comm, checkpoint, bars, self.between)
        if checkpoint is not None and self.number >= 0:
            load_pushes(checkpoint, self.worker, self.number, self.servers.push)

        self.ends: list[StepEnd] = []
        self.last: Updates | None = None
        self.kept: list[Tensors] | None = None
        self.copies: dict[int, ps.Weights] = {}

    def _resumed(self) -> Checkpoint | None:
        """Return the checkpoint that the job goes on from, with the state of its techniques and its buffers loaded."""
        if not self.config.resume or not self.config.save:
            return None
        checkpoint = Checkpoint(self.config.save, step=history(self.config).from_step)
        load_extensions(self.job, same_job(checkpoint, self.job, self.comm.rank), checkpoint)
        load_buffers(checkpoint, self.job.model)
        return checkpoint

    def observe(self, updates: Updates) -> None:
        """Note an update of this server."""
        if updates.version % self.per_step == 0:
            self.ends.append(StepEnd.now(self.comm))
            done, weights = self.done + updates.version // self.per_step, updates.shard.weights
            if done in evaluated_steps(self.config, self.done):
                self.copies[done] = {key: track(xp.array(array), "parameter") for key, array in weights.items()}
        self.last = updates
        if self.kept is not None:
            self.kept.append(server_tensors(updates))

    def between(self, clock: int) -> None:
        """Save between two steps of bsp: every worker has the weights of a clock, and none has pushed."""
        done, every = self.done + clock, self.config.every
        if self.config.save and every and done % every == 0 and done < self.config.steps:
            self.finish(done)
            self.save()

    def finish(self, done: int) -> None:
        """Learn the losses of the first `done` steps, and tell the extensions that all workers have made them.

        A loss is the sum of its micro-batches' losses in their global order. Every worker sends its own to all ranks (8
        B each, purpose metrics).
        """
        batches, steps = self.batches, range(len(self.losses), done)
        own = [loss for step in steps for loss in self.worker.losses.get((self.number, step), [])]
        with purpose("metrics"):
            losses = self._of_workers(own, len(steps) * batches.accumulation)
        # (replica, step, micro-batch)
        table = losses.reshape(batches.dp, len(steps), batches.accumulation)
        self.losses += [ordered_sum(table[:, step].reshape(-1).tolist()) for step in range(len(steps))]
        for extension in self.job.extensions:
            extension.before_step(len(steps) * batches.global_batch)
            extension.after_update(Moment(self.comm, steps, None))

    def _of_workers(self, own: list[float], count: int) -> Any:
        """Return the numbers of all workers, in their order. own: of this worker; count: how many each has."""
        counts = [0] * self.config.servers + [count] * self.batches.dp
        return all_gather(self.comm, np.array(own, np.float64), counts=counts)

    def save(self) -> None:
        """Write the job after the steps that have losses; every rank calls it.

        Servers write weights and optimizer state, and workers what they have not pushed yet.
        """
        comm, directory, losses, push = self.comm, self.config.save, self.losses, self.servers.push
        shards = [] if self.last is None else checkpoint_shards(self.last)
        if push is not None and self.number >= 0:
            shards += push_shards(self.worker, self.number, push)
        replica = ReplicaId(comm.rank, comm.size)
        with purpose("checkpoint"):
            shards += buffer_shards((name, array, replica) for name, array in self._mean_buffers().items())
        # Rank 0 is a server and writes the state.
        optimizer = None if self.last is None else self.last.optimizer
        steps = 0 if optimizer is None else optimizer.step_count
        state = job_state(self.job, len(losses), losses, steps, {}) if comm.rank == 0 else {}
        save(comm, directory, len(losses), shards, state, self.storage)
        keep_last(comm, directory, history(self.config).keep, losses, self.storage)

    def held_out_losses(self, final: ps.Weights) -> dict[int, dict[str, float]]:
        """Return the losses on held-out data by name, by steps done. Every rank calls it; the model changes.

        final: the weights at the end. Sends, with purpose evaluation, every server's copies and every worker's losses
        (8 B each) to all other ranks, and an all-reduce of the running statistics.
        """
        comm, job, result = self.comm, self.job, {}
        shards = ps.make_shards(self.config.servers, final)
        for done in evaluated_steps(self.config, self.done):
            with purpose("evaluation", whole=True), FlopCounter() as flops:
                # [1] The weights of all servers, and the mean of the workers' statistics.
                for server, shard in enumerate(shards):
                    for key, weight in self.copies.get(done, {}).items() if comm.rank == server else ():
                        shard.weights[key][...] = weight
                    broadcast(comm, shard.flat, server)
                self.worker.load({key: value for shard in shards for key, value in shard.weights.items()})
                job.model.load_state_dict(self._mean_buffers(self.worker.buffers.get(done)), strict=False)
                # [2], [3]
                result[done] = evaluations(job, done, self._held_out_loss)
            comm.compute(flops.take(), name="evaluation")
        return result

    def _held_out_loss(self) -> float:
        """Return the mean loss of the held-out batch: the micro-batches of all workers, in their global order."""
        own = self.worker.held_out(self.number) if self.number >= 0 else []
        return ordered_sum(self._of_workers(own, self.batches.accumulation).tolist())

    def _mean_buffers(self, own: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the mean of the workers' running statistics of batch normalisation: each worker saw its own rows.

        own: of this rank; None: as they are now. Every rank calls it; an all-reduce of 8 B per number.
        """
        own = dict(named_buffers(self.job.model)) if own is None else own
        if not own:
            return {}
        words = xp.concatenate(list(own.values())) * (self.number >= 0)
        all_reduce(self.comm, words)
        parts = cut(words, [array.size for array in own.values()])
        return {name: part / self.batches.dp for name, part in zip(own, parts, strict=True)}

    def show(self, observers: Sequence[Observer], held_out: Mapping[int, Mapping[str, float]]) -> None:
        """Let observers see the steps of this run in order, as those of the training loop do."""
        for step in range(self.done, len(self.losses)):
            end = self.ends[step - self.done] if self.ends else None
            found = held_out.get(step + 1, {})
            for observer in observers:
                observer(StepState(self.comm.rank, step, self.losses[step], self.job, None, found, self.comm, end))

    def sizes(self) -> AxisSizes:
        """Return the element counts of the model, which every worker has whole."""
        sizes = {p.name: p.size for p in self.worker.flat.parameters}
        norms = tuple(layer.weight.size for layer in batch_norms(self.job.model))
        return AxisSizes(0, False, [sum(sizes.values())], [], sizes, norms=norms)


def run_parameter_server(comm: Comm, config: Any, observers: Sequence[Observer] = (), keep: bool = False) -> ServedJob:
    """Run this rank's part of the job, a server's or a worker's; every rank calls it and returns the same losses.

    Observers see this run's steps at the end, when their losses are known on every rank; a Progress of a worker shows
    the steps of that worker while it works. keep: keep the tensors of every update, for a comparison.
    """
    bars = [observer.working for observer in observers if isinstance(observer, Progress)]
    with account_memory() as account, xp.quiet_overflow(), ExitStack() as stack:
        rank = ServedRank(comm, config, stack.enter_context(saving_alone(comm, config)), bars)
        rank.kept = [] if keep else None
        job, worker = rank.job, rank.worker
        # A worker is a replica, and reads the batches that the replica of the same number would read.
        for extension in job.extensions if rank.number >= 0 else ():
            reading = extension.reading(job.sampler, rank.number, range(worker.done, config.steps))
            job.sampler = stack.enter_context(reading)

        # Push and pull until every worker has made its steps.
        steps = config.steps - worker.done
        initial, observe, between = worker.initial_weights(), rank.observe, rank.between
        run = ps.run(comm, rank.servers, initial, worker.gradient, steps, observe=observe, between=between)
        if worker.losses:
            worker.end_step(steps)  # closes the span of the worker's last step

        # The steps' losses are known now that all workers have finished.
        rank.finish(config.steps)
        if config.save:
            rank.save()
        held_out = rank.held_out_losses(run.weights)

    rank.show(observers, held_out)
    peak, sizes, final = dict(account.at_peak), [rank.sizes()], _digest(run.weights)
    result = TrainResult(comm.rank, rank.losses, account.peak, peak, sizes, final, rank.done)
    result.held_out = {step: found["held_out_loss"] for step, found in held_out.items()}
    return ServedJob(result, run.weights, worker.losses, rank.kept or [])


def _digest(weights: Mapping[str, Array]) -> str:
    """Return a fingerprint of the final weights, which every rank has."""
    result = hashlib.sha256()
    for name in sorted(weights):
        result.update(weights[name].tobytes())
    return result.hexdigest()
