"""Does a job with a parameter server equal one device? After the run, from what its ranks kept and its servers' traces.

bsp               ordered tier: the reference of data parallelism, step by step: every gradient, weight and optimizer
state of
                  every server after every update, every loss, and the weights that every rank has at the end
delay, ssp, asp   replay: the same, against a device that makes the recorded updates in the recorded order, each with
the
                  weights that its worker had pulled
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.base.trace import Trace
from minidist.comm import Comm
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.equality.compare import Comparison, Judge, expected_snapshots, group_of, scales_of
from minidist.parallel import parameter_server as ps
from minidist.parallel.parameter_server.server import Updates
from minidist.train.job import build
from minidist.train.strategies.servers import Served, Snapshot, Worker, ordered_sum, serve, server_config, snapshot


def serve_and_keep(comm: Comm, config: TrainConfig) -> Served:
    """A rank's part of the job; every update is kept."""
    return serve(comm, config, keep=True)


def compare_served(config: TrainConfig, served: Sequence[Served], traces: Sequence[Trace]) -> Comparison:
    """The verdict. served, traces: of all ranks, in rank order."""
    batches = resolve_batches(config, len(served))
    worker = Worker(build(config, batches))
    initial, servers = worker.initial(), server_config(worker.job)
    held = [list(shard.keys) for shard in ps.make_shards(config.servers, initial)]
    result = served[0].result
    assert result is not None
    if config.consistency == "bsp":
        judge = Judge([], "ordered")
        whole = expected_snapshots(config, len(served))
        expected = [[_of_keys(step, keys) for step in whole] for keys in held]
        losses = [float(step["loss"]["loss"]) for step in whole]
        final = whole[-1]["weights"]
    else:
        judge = Judge([], "replay")
        judge.verdict.bound = 0.0
        expected = [[] for _ in held]

        def observe(server: int, updates: Updates) -> None:
            expected[server].append(snapshot(updates))

        final = ps.replay(ps.read_records(traces, servers), servers, initial, worker.gradient, observe)
        losses = [_loss_of(worker, config, batches.dp, step) for step in range(config.steps)]
    verdict = judge.verdict
    verdict.ranks, verdict.steps, verdict.losses, verdict.reference_losses = (
        len(served),
        config.steps,
        result.losses,
        losses,
    )
    for rank, (kept, wanted) in enumerate(zip(served, expected, strict=False)):
        if len(kept.updates) != len(wanted):
            judge.differs(f"server {rank} made {len(kept.updates)} updates, one device {len(wanted)}")
        for number, (actual, right) in enumerate(zip(kept.updates, wanted, strict=False)):
            _judge_all(judge, actual, right, SimpleNamespace(step=number, rank=rank))
    for rank, kept in enumerate(served):
        end = SimpleNamespace(step=config.steps - 1, rank=rank)
        assert kept.result is not None
        _judge_all(judge, {"weights": kept.weights}, {"weights": final}, end)
        for step, (mine, theirs) in enumerate(zip(kept.result.losses, losses, strict=True)):
            _judge_all(
                judge,
                {"loss": {"loss": np.array(mine)}},
                {"loss": {"loss": np.array(theirs)}},
                SimpleNamespace(step=step, rank=rank),
            )
    return verdict


def _of_keys(step: Snapshot, keys: Sequence[str]) -> Snapshot:
    """What a server with these keys has of a whole snapshot."""
    return {
        "gradients": {key: step["gradients"][key] for key in keys},
        "weights": {key: step["weights"][key] for key in keys},
        "optimizer": {
            name: array
            for name, array in step["optimizer"].items()
            if name.rpartition(".")[0] in keys or (keys and name == "step_count")
        },
    }


def _loss_of(worker: Worker, config: TrainConfig, workers: int, step: int) -> float:
    return ordered_sum(np.concatenate([worker.losses[number, step] for number in range(workers)]))


def _judge_all(judge: Judge, actual: Snapshot, expected: Snapshot, state: Any) -> None:
    for kind, tensors in actual.items():
        judge.same_names(kind, tensors, expected[kind], state)
        scales = scales_of(kind, expected[kind])
        for name in tensors.keys() & expected[kind].keys():
            judge.tensor(kind, name, tensors[name], expected[kind][name], scales[group_of(kind, name)], state)
