"""The loop of `--strategy ps` as the commands see it, which `trainer.py` runs, and its comparison with one device.

The comparison is made after the run, from what the ranks kept and their traces.

bsp               ordered tier: the reference of data parallelism, step by step: every gradient, weight and optimizer
                  state of every server after every update, every loss, and the weights of every rank at the end
delay, ssp, asp   replay: the same, against a device that makes the recorded updates in the recorded order, each with
                  the weights that its worker had pulled; so is bsp with --compression, which rounds gradients

Proved by: tests/train/test_servers.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base.traces import Trace
from minidist.core.comm import Comm
from minidist.core.train.task import ordered_sum
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import Comparison, Judge
from minidist.job.equality.expected import expected_snapshots
from minidist.job.equality.snapshot import Snapshot
from minidist.job.train.job import build
from minidist.job.train.progress import Progress
from minidist.nn.buffers import named_buffers
from minidist.techniques import parameter_server as ps
from minidist.techniques.own_loop import OwnLoop
from minidist.techniques.parameter_server.ranks import (
    Worker,
    evaluated_steps,
    parameter_server_bytes,
    server_config,
    server_tensors,
)
from minidist.techniques.parameter_server.server import Updates
from minidist.techniques.parameter_server.trainer import ServedJob, run_parameter_server


def serve_and_keep(comm: Comm, config: Any, progress: Progress | None = None) -> ServedJob:
    """Run a rank's part of the job and keep the tensors of every update. progress: shown by the first worker."""
    observers = [progress] if progress is not None and comm.rank == config.servers else []
    return run_parameter_server(comm, config, observers, keep=True)


def compare_served(
    config: Any, served: Sequence[ServedJob], traces: Sequence[Trace], progress: Progress | None = None
) -> Comparison:
    """Return the verdict. served, traces: of all ranks, in rank order. progress: of the one device."""
    worker = Worker(
        build(config, resolve_batches(config, len(served))), watching=[progress.working] if progress is not None else []
    )
    judge, expected, losses, final = _expected(config, worker, traces, progress)
    verdict = judge.verdict
    verdict.ranks, verdict.steps = len(served), config.steps
    verdict.losses, verdict.reference_losses = served[0].result.losses, losses

    # Every update of every server; zip stops at the servers, who are the first ranks.
    for rank, (job, wanted) in enumerate(zip(served, expected, strict=False)):
        if len(job.updates) != len(wanted):
            judge.differs(f"server {rank} made {len(job.updates)} updates, one device {len(wanted)}")
        for step, (actual, right) in enumerate(zip(job.updates, wanted, strict=False)):
            judge.compare(actual, right, step, rank)

    _judge_held_out(judge, worker, served, expected)

    # Every rank's final weights and losses.
    for rank, job in enumerate(served):
        judge.compare({"weights": job.weights}, {"weights": final}, config.steps - 1, rank)
        for step, (actual_loss, loss) in enumerate(zip(job.result.losses, losses, strict=True)):
            judge.compare({"loss": {"loss": np.array(actual_loss)}}, {"loss": {"loss": np.array(loss)}}, step, rank)
    return verdict


def _expected(
    config: Any, worker: Worker, traces: Sequence[Trace], progress: Progress | None
) -> tuple[Judge, list[list[Snapshot]], list[float], Any]:
    """Return a judge, what each server must hold after each update, and the losses and the weights at the end."""
    initial, servers = worker.initial_weights(), server_config(worker.job)
    # The names of each server's parameters.
    keys_of = [list(shard.keys) for shard in ps.make_shards(config.servers, initial)]

    # Every update of bsp is one of data parallelism: of a whole clock, with gradients as they are.
    if config.consistency == "bsp" and servers.push is None:
        whole = expected_snapshots(config, len(traces), observers=[progress] if progress is not None else [])
        losses = [float(step["loss"]["loss"]) for step in whole]
        expected = [[_of_keys(step, keys) for step in whole] for keys in keys_of]
        return Judge([], "ordered"), expected, losses, whole[-1]["weights"]

    # Otherwise: the recorded updates, made again in the recorded order.
    expected = [[] for _ in keys_of]

    def observe(server: int, updates: Updates) -> None:
        expected[server].append(server_tensors(updates))

    final = ps.replay(ps.read_records(traces, servers), servers, initial, worker.gradient, observe)
    losses = [
        ordered_sum([loss for number in range(worker.job.batches.dp) for loss in worker.losses[number, step]])
        for step in range(config.steps)
    ]
    return Judge([], "replay"), expected, losses, final


def _judge_held_out(judge: Judge, worker: Worker, served: Sequence[ServedJob], expected: Sequence[Any]) -> None:
    """Compare the losses on held-out data with those of the weights that each server must have at that step.

    With running statistics there is nothing to compare: those of the one device are of the rows of all workers.
    """
    config, dp = worker.job.config, worker.job.batches.dp
    for done in () if dict(named_buffers(worker.job.model)) else evaluated_steps(config, 0):
        version = done * len(expected[0]) // config.steps
        worker.load({key: array for updates in expected for key, array in updates[version - 1]["weights"].items()})
        loss = ordered_sum([loss for number in range(dp) for loss in worker.held_out(number)])
        for rank, job in enumerate(served):
            actual, right = ({"held_out_loss": np.array(value)} for value in (job.result.held_out[done], loss))
            judge.compare({"loss": actual}, {"loss": right}, done - 1, rank)


def _of_keys(step: Snapshot, keys: Sequence[str]) -> Snapshot:
    """Return the part of a whole snapshot that a server with these keys has."""
    return {
        "gradients": {key: step["gradients"][key] for key in keys},
        "weights": {key: step["weights"][key] for key in keys},
        "optimizer": {
            name: array
            for name, array in step["optimizer"].items()
            if name.rpartition(".")[0] in keys or (keys and name == "step_count")
        },
    }


class ServerLoop(OwnLoop):
    """Servers and workers of a job. Rank 0 is a server, so the first worker shows the progress."""

    no_device = "--strategy ps keeps the weights of its servers on the host; leave out --device"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shown_by = config.servers

    def train(self, comm: Comm, observers: Sequence[Any]) -> Any:
        return run_parameter_server(comm, self.config, observers).result

    def bytes_sent(self, batches: Any, first: Any) -> dict[str, int]:
        return parameter_server_bytes(self.config, batches, first.sizes[0], first.first_step)

    def bytes_averaged(self, first: Any) -> int:
        # The running statistics of batch norms: a mean and a variance of 8 B for each channel.
        return 2 * 8 * sum(first.sizes[0].norms)  # type: ignore[no-any-return]

    def train_and_keep(self, comm: Comm, progress: Any) -> Any:
        return serve_and_keep(comm, self.config, progress)

    def compare(self, kept: Sequence[Any], traces: Sequence[Trace], progress: Any) -> Any:
        return compare_served(self.config, kept, traces, progress)
