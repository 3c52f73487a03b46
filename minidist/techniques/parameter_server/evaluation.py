"""`--evaluate-every` with a parameter server: the held-out loss of the weights after each multiple of that many steps.

A server copies its weights when it has made the updates of such a step, and a worker its running statistics when it
begins the next one. The losses are computed after the last push, so that no message of an evaluation changes the order
of the updates:

    servers   copy after N, 2N, ... steps     [1] every copy to all ranks     [3] the sum in the global order
    workers   train                           [2] the loss of own micro-batches

With bsp the weights are those of one device after N steps. With the other consistencies they are what every server has
after N updates, or after N pushes of each worker. The copies of one evaluation need the memory of one model.

Proved by: tests/train/test_servers.py
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.base.flop_counter import FlopCounter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather, all_reduce, broadcast
from minidist.core.comm import Comm
from minidist.core.train.task import ordered_sum
from minidist.job.train.evaluate import evaluations
from minidist.job.train.job import Job
from minidist.nn.buffers import named_buffers
from minidist.techniques import parameter_server as ps
from minidist.techniques.parameter_server.ranks import Worker, evaluated_steps


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
