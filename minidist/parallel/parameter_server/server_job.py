"""One training with servers and workers, as a call of all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minidist.base.errors import RankDeadError, UsageError
from minidist.base.trace import purpose
from minidist.comm import CollectiveCall, Comm, PointToPoint, Request
from minidist.parallel.parameter_server.server import Server, Updates
from minidist.parallel.parameter_server.server_config import ServerConfig, parse_consistency
from minidist.parallel.parameter_server.server_shards import ServerShard, Weights, joined, make_shards
from minidist.parallel.parameter_server.worker import Gradient, work

FINAL = 1  # tag of the last weights: a server that still serves must not take another's for a push


@dataclass
class ServerResult:
    """weights: the final ones, on every rank. pushes: of this worker. staleness: of each update (servers, asp and ssp)."""

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
) -> ServerResult:
    """Train with `config.servers` servers and `comm.size - config.servers` workers; a call of all ranks.

    initial: {key: array}, of one dtype; rank 0's count (broadcast, purpose startup). gradient(worker, clock, weights):
    what a worker computes. observe(updates): called on a server after each of its updates. steps: pushes of each
    worker, or a function (comm, clock) -> "is this push the last one?". seconds(worker, clock): virtual time of a
    gradient.

    A push sends to every server a head of 2 + (its sparse keys) numbers of 8 B, its dense keys' gradient, and for each
    sparse key the touched rows (8 B and a row each); a pull the server's keys; at the end every server sends its keys
    to all other ranks. Purposes: startup, parameter_push, parameter_pull.

    A worker that is killed, in a world that survives it, is missed by nobody: what had come of it whole is applied,
    once, and the others go on. Raises RankDeadError when a server dies. Raises UsageError when there is no worker, no
    server, a negative bound, or weights of several dtypes.
    """
    check(comm, config, initial, steps)
    comm = comm.dup()
    whole = ServerShard(list(initial), initial, config.sparse)
    dead = first_weights(_agreed(comm, config, whole), config.servers, whole)
    initial = whole.weights
    shards = make_shards(config.servers, initial, config.sparse)
    staleness: list[int] = []
    pushes = 0
    if comm.rank < config.servers:
        server = Server(comm, config, shards[comm.rank], observe)
        for error in dead:
            server.bury(error)
        server.serve()
        staleness = server.staleness
    else:
        pushes = work(comm, shards, gradient, steps, seconds)
    last_pull(comm, shards)
    return ServerResult(joined(initial, [shard.weights for shard in shards]), pushes, staleness)


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
    """A channel whose every message says what all ranks must have alike: servers that differ would wait, or mix two
    rules.
    """
    keys = ", ".join(
        f"{key}{list(shape)}{' sparse' if key in whole.sparse else ''}" for key, shape in whole.shapes.items()
    )
    return comm.collective(f"servers/{config.servers} {config.consistency}", keys)


def first_weights(comm: PointToPoint, servers: int, whole: ServerShard) -> list[RankDeadError]:
    """Rank 0 sends the initial weights to all others, straight: a tree could have a dead worker inside. Returns who
    was.
    """
    with purpose("startup"):
        if comm.rank > 0:
            comm.recv(whole.flat, 0)
            return []
        return wait_for_the_living(comm, servers, [comm.isend(whole.flat, rank) for rank in range(1, comm.size)])


def last_pull(comm: Comm, shards: Sequence[ServerShard]) -> None:
    """Every server sends its final weights to all others."""
    with purpose("parameter_pull"):
        requests = [comm.irecv(shard.flat, server, FINAL) for server, shard in enumerate(shards) if server != comm.rank]
        if comm.rank < len(shards):
            requests += [
                comm.isend(shards[comm.rank].flat, rank, FINAL) for rank in range(comm.size) if rank != comm.rank
            ]
        wait_for_the_living(comm, len(shards), requests)


def wait_for_the_living(comm: PointToPoint, servers: int, requests: Sequence[Request]) -> list[RankDeadError]:
    """Wait for all; a dead worker needs nothing any more, a dead server ends the run: its weights are gone."""
    dead = []
    for request in requests:
        try:
            comm.wait(request)
        except RankDeadError as error:
            if comm.members.index(error.rank) < servers:
                raise
            dead.append(error)
    return dead
