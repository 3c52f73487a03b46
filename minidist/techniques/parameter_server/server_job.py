"""One run of training with servers and workers, called by all ranks.

    [1] rank 0's weights to all ranks  ──▶  [2] servers serve, workers work  ──▶  [3] the final weights to all ranks

Proved by: tests/parallel/test_parameter_server.py, tests/parallel/test_killed_workers.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minidist.core.base.errors import RankDeadError, UsageError
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.comm import CollectiveCall, Comm, PointToPoint, Request
from minidist.techniques.parameter_server.server import Server, ServerConfig, Updates, parse_consistency
from minidist.techniques.parameter_server.server_shards import (
    ServerShard,
    Weights,
    compress_pushes,
    joined,
    make_shards,
)
from minidist.techniques.parameter_server.worker import Gradient, work

new_purpose("parameter_pull")

FINAL = 1  # tag of the final weights: a server that still serves must not take another server's for a push


@dataclass
class ServerResult:
    """The result of a run on one rank.

    weights: the final ones, on every rank. pushes: of this worker. staleness: of each update (servers, asp and ssp).
    """

    weights: Weights
    pushes: int
    staleness: list[int]


def run(
    comm: Comm,
    config: ServerConfig,
    initial: Weights,
    gradient: Gradient,
    steps: int | Callable[[Comm, int], bool],
    seconds: Callable[[int, int], float] = lambda worker, clock: 0.0,
    observe: Callable[[Updates], None] | None = None,
    between: Callable[[int], None] | None = None,
) -> ServerResult:
    """Train with `config.servers` servers and `comm.size - config.servers` workers; every rank calls it.

    initial: {key: array}, of one dtype; rank 0's count (broadcast, purpose startup). gradient(worker, clock, weights):
    what a worker computes. observe(updates): called on a server after each of its updates. between(clock): called on
    a server when it has sent the weights of that clock (bsp). steps: pushes of each
    worker, or a function (comm, clock) -> "is this push the last one?". seconds(worker, clock): virtual time of a
    gradient.

    A push sends to every server a head of 2 + (its sparse keys) numbers of 8 B, its dense keys' gradient, and for each
    sparse key the touched rows (8 B and a row each); a pull the server's keys; at the end every server sends its keys
    to all other ranks. Purposes: startup, parameter_push, parameter_pull.

    When a worker is killed, in a world that survives it, the others go on, and its pushes that were received whole are
    applied, once. Raises RankDeadError when a server dies. Raises UsageError when there is no worker, no server, a
    negative bound, or weights of several dtypes.
    """
    check(comm, config, initial, steps)
    comm = comm.dup()

    # [1] Every rank starts from rank 0's weights, and cuts the same shards from them without a message.
    whole = ServerShard(list(initial), initial, config.sparse)
    dead = first_weights(_agreed(comm, config, whole), config.servers, whole)
    names = list(initial)
    shards = make_shards(config.servers, whole.weights, config.sparse)
    if config.push is not None:
        compress_pushes(shards, config.push, comm)
    del whole, initial  # two copies of the weights that nothing reads again

    # [2] The first ranks serve, the others work, until each worker has pushed for the last time.
    staleness: list[int] = []
    pushes = 0
    if comm.rank < config.servers:
        server = Server(comm, config, shards[comm.rank], observe, between)
        for error in dead:
            server.remove_worker(error)
        server.serve()
        staleness = server.staleness
    else:
        pushes = work(comm, shards, gradient, steps, seconds)

    # [3] The final weights, on every rank.
    last_pull(comm, shards)
    return ServerResult(joined(names, [shard.weights for shard in shards]), pushes, staleness)


def check(comm: Comm, config: ServerConfig, initial: Weights, steps: int | Callable[[Comm, int], bool] = 1) -> None:
    """Raise UsageError for what cannot be run."""
    if isinstance(steps, int) and steps < 1:
        raise UsageError(f"rank {comm.rank}: {steps} steps; a worker needs at least 1")
    if not 1 <= config.servers < comm.size:
        raise UsageError(
            f"rank {comm.rank}: {config.servers} servers among {comm.size} ranks; there must be at least 1 server and 1"
            f" worker: 1 to {comm.size - 1} servers"
        )
    if parse_consistency(config.consistency).aggregate and config.staleness_aware:
        raise UsageError(f"a staleness-aware rate has no meaning with consistency {config.consistency}; use ssp or asp")
    if not initial or len({value.dtype for value in initial.values()}) != 1:
        kinds = sorted({str(value.dtype) for value in initial.values()})
        raise UsageError(f"rank {comm.rank}: the weights need one dtype, got {', '.join(kinds) or 'no weights'}")
    if next(iter(initial.values())).dtype.kind in "iub":
        raise UsageError(
            f"rank {comm.rank}: the weights are {next(iter(initial.values())).dtype}, which cannot follow a gradient;"
            " pass floats"
        )
    for key in config.sparse:
        if key not in initial or initial[key].ndim != 2:
            raise UsageError(f"sparse key {key!r} must be a matrix among the weights {', '.join(initial)}")


def _agreed(comm: Comm, config: ServerConfig, whole: ServerShard) -> CollectiveCall:
    """Return a collective call in which all ranks must agree on servers, consistency and keys.

    Ranks that differ would wait for each other, or mix two rules; this way the first message says who differs.
    """
    keys = ", ".join(
        f"{key}{list(shape)}{' sparse' if key in whole.sparse else ''}" for key, shape in whole.shapes.items()
    )
    pushed = "" if config.push is None else f" {config.push}"
    return comm.collective(f"servers/{config.servers} {config.consistency}{pushed}", keys)


def first_weights(comm: PointToPoint, servers: int, whole: ServerShard) -> list[RankDeadError]:
    """Send rank 0's initial weights to all others; returns the errors of the workers that are dead.

    Each message goes directly to its receiver: a tree could have a dead worker inside.
    """
    with purpose("startup"):
        if comm.rank > 0:
            comm.recv(whole.flat, 0)
            return []
        return waitall_but_dead_workers(comm, servers, [comm.isend(whole.flat, rank) for rank in range(1, comm.size)])


def last_pull(comm: Comm, shards: Sequence[ServerShard]) -> None:
    """Send every server's final weights to all other ranks."""
    with purpose("parameter_pull"):
        # Everything is posted before anything is waited for: servers also send their keys to each other.
        requests = [comm.irecv(shard.flat, server, FINAL) for server, shard in enumerate(shards) if server != comm.rank]
        if comm.rank < len(shards):
            requests += [
                comm.isend(shards[comm.rank].flat, rank, FINAL) for rank in range(comm.size) if rank != comm.rank
            ]
        waitall_but_dead_workers(comm, len(shards), requests)


def waitall_but_dead_workers(comm: PointToPoint, servers: int, requests: Sequence[Request]) -> list[RankDeadError]:
    """Wait for all requests; return the errors of dead workers. A dead server ends the run: its weights are lost."""
    dead = []
    for request in requests:
        try:
            comm.wait(request)
        except RankDeadError as error:
            # A dead worker needs no weights; a dead server has lost some.
            if comm.members.index(error.rank) < servers:
                raise
            dead.append(error)
    return dead
