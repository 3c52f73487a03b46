"""The parameter server: some ranks hold the weights, the others compute gradients, and nobody need wait for everybody.

    servers   rank 0: keys a, c     rank 1: key b       each key (a parameter) lives on one server
                 ▲  │                  ▲  │
            push │  │ pull        push │  │ pull        gradients up, weights down
                 │  ▼                  │  ▼
    workers   rank 2 ... rank n-1                       worker w at its clock c computes gradient (w, c)

A worker pushes the gradient of its clock c to all servers, and each answers, as the next pull, with its weights, when the
*consistency* allows that worker to start clock c+1:

    bsp        all workers' gradients of a clock are added in worker order and applied as one update; everybody waits
    delay:t    the same, but a worker may run up to t clocks ahead of the last update (bounded delay; delay:0 is bsp)
    ssp:s      every push is an update of its own, applied as it comes; a worker may start clock c when the slowest has
               done c-s pushes: it sees all updates of the clocks up to c-s-1, and its own (stale synchronous)
    asp        ssp without a bound: nobody waits for anybody

What comes first is decided by the network: a server's receive is a wildcard. So a run's numbers depend on its order, but on
nothing else: the order of each server's updates and the version that each pull saw are in the trace, and `replay` computes
the same weights from them on one device, bit for bit.

Sources: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014 (servers, bounded delay); Ho
et al., More effective distributed ML via a stale synchronous parallel parameter server, NeurIPS 2013; Zhang et al.,
Staleness-aware async-SGD, IJCAI 2016 (the rate divided by the staleness).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, NamedTuple

from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.errors import UsageError
from minidist.base.layout import offsets
from minidist.base.trace import Trace, purpose
from minidist.collectives import broadcast
from minidist.comm import ANY, Comm
from minidist.optim import Optimizer, ParameterSlice

Weights = dict[str, Array]


class Rows(NamedTuple):
    """A sparse gradient of a matrix: `values[i]` belongs to row `ids[i]`; rows that are not named have gradient zero."""

    ids: Array  # (touched,) int64
    values: Array  # (touched, width)


Gradient = Callable[[int, int, Weights], Mapping[str, Any]]  # (worker, clock, weights) -> {key: array or Rows}


class Consistency(NamedTuple):
    """How far a worker may run ahead (`bound` clocks), and whether a clock's gradients are one update (`aggregate`)."""

    bound: float
    aggregate: bool


def parse_consistency(text: str) -> Consistency:
    """ "bsp", "asp", "ssp:2", "delay:3"."""
    name, _, number = text.partition(":")
    if text in ("bsp", "asp"):
        return Consistency(0, True) if text == "bsp" else Consistency(inf, False)
    if name not in ("ssp", "delay") or not number.lstrip("-").isdigit():
        raise UsageError(f"consistency {text!r}; it must be bsp, asp, ssp:S or delay:T, with a number of clocks S, T")
    if int(number) < 0:
        raise UsageError(f"consistency {text!r} has the bound {number}; it must be at least 0 clocks (0: wait for all)")
    return Consistency(int(number), name == "delay")


@dataclass(frozen=True)
class ServerConfig:
    """servers: how many of the ranks (the first ones). optimizer: makes each server's optimizer from its slices.

    sparse: keys (matrices) of which only touched rows are pushed. staleness_aware: an update's learning rate is divided by
    the number of updates that its worker had not seen (asp and ssp).
    """

    servers: int
    consistency: str
    optimizer: Callable[[Sequence[ParameterSlice]], Optimizer]
    sparse: frozenset[str] = field(default_factory=frozenset)
    staleness_aware: bool = False


@dataclass
class ServerResult:
    """weights: the final ones, on every rank. pushes: of this worker. staleness: of each update (servers, asp and ssp)."""

    weights: Weights
    pushes: int
    staleness: list[int]


def assign_keys(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Which keys each server holds: the largest first, each to the server with the fewest elements so far.

    So two servers' loads differ by at most the largest key.
    """
    held: list[list[int]] = [[] for _ in range(servers)]
    load = [0] * servers
    for key in sorted(range(len(sizes)), key=lambda key: (-sizes[key], key)):
        server = load.index(min(load))
        held[server].append(key)
        load[server] += sizes[key]
    return [sorted(keys) for keys in held]


class Shard:
    """The keys of one server as one flat array (`flat`), with the keys as views (`weights`)."""

    def __init__(self, keys: Sequence[str], initial: Weights, sparse: frozenset[str]) -> None:
        self.keys, self.shapes = list(keys), {key: initial[key].shape for key in keys}
        self.start = dict(zip(self.keys, offsets([prod(self.shapes[key]) for key in keys]), strict=False))
        self.dense = [key for key in keys if key not in sparse]
        self.sparse = [key for key in keys if key in sparse]
        self.flat = xp.concatenate(
            [initial[next(iter(initial))].reshape(-1)[:0], *(initial[k].reshape(-1) for k in keys)]
        )
        self.weights = self.views(self.flat)

    def views(self, flat: Array) -> Weights:
        return {
            key: flat[self.start[key] : self.start[key] + prod(shape)].reshape(shape)
            for key, shape in self.shapes.items()
        }

    def gradient(self, contributions: Mapping[str, Any]) -> Array:
        """A flat gradient of the whole shard; rows that were not pushed are zeros."""
        flat = xp.zeros_like(self.flat)
        for key, view in self.views(flat).items():
            value = contributions[key]
            if isinstance(value, Rows):
                xp.scatter_add_rows(view, value.ids, value.values)
            else:
                view[...] = value
        return flat


def make_shards(config: ServerConfig, initial: Weights) -> list[Shard]:
    names = list(initial)
    held = assign_keys([initial[name].size for name in names], config.servers)
    return [Shard([names[key] for key in keys], initial, config.sparse) for keys in held]


def run(
    comm: Comm,
    config: ServerConfig,
    initial: Weights,
    gradient: Gradient,
    steps: int | Callable[[Comm, int], bool],
    seconds: Callable[[int], float] = lambda worker: 0.0,
) -> ServerResult:
    """Train with `config.servers` servers and `comm.size - config.servers` workers; a call of all ranks.

    initial: {key: array}, of one dtype; rank 0's count (broadcast, purpose startup). gradient(worker, clock, weights): what
    a worker computes. steps: pushes of each worker, or a function (comm, clock) -> "is this push the last one?".
    seconds(worker): virtual time of a gradient.

    A push sends to every server a head of 2 + (its sparse keys) numbers of 8 B, its dense keys' gradient, and for each
    sparse key the touched rows (8 B and a row each); a pull the server's keys. Purposes: parameter_push, parameter_pull.
    Raises UsageError when there is no worker, no server, a negative bound, or weights of several dtypes.
    """
    check(comm, config, initial, steps)
    comm = comm.dup()
    whole = Shard(list(initial), initial, config.sparse)
    with purpose("startup"):
        broadcast(comm, whole.flat, algorithm="binomial")
    initial = whole.weights
    shards = make_shards(config, initial)
    staleness: list[int] = []
    pushes = 0
    if comm.rank < config.servers:
        server = Server(comm, config, shards[comm.rank])
        server.serve()
        staleness = server.staleness
    else:
        pushes = _work(comm, config, shards, gradient, steps, seconds)
    with purpose("parameter_pull"):
        for index, shard in enumerate(shards):
            broadcast(comm, shard.flat, index, algorithm="binomial")
    return ServerResult(_in_order(initial, [shard.weights for shard in shards]), pushes, staleness)


def check(comm: Comm, config: ServerConfig, initial: Weights, steps: int | Callable[[Comm, int], bool] = 1) -> None:
    """Raise UsageError for what cannot be run."""
    if isinstance(steps, int) and steps < 1:
        raise UsageError(f"rank {comm.rank}: {steps} steps; a worker needs at least 1")
    if not 1 <= config.servers < comm.size:
        raise UsageError(
            f"rank {comm.rank}: {config.servers} servers among {comm.size} ranks; there must be at least 1 server and 1 "
            f"worker: 1 to {comm.size - 1} servers"
        )
    if parse_consistency(config.consistency).aggregate and config.staleness_aware:
        raise UsageError(f"a staleness-aware rate has no meaning with consistency {config.consistency}; use ssp or asp")
    if not initial or len({value.dtype for value in initial.values()}) != 1:
        kinds = sorted({str(value.dtype) for value in initial.values()})
        raise UsageError(f"rank {comm.rank}: the weights need one dtype, got {', '.join(kinds) or 'no weights'}")
    for key in config.sparse:
        if key not in initial or initial[key].ndim != 2:
            raise UsageError(f"sparse key {key!r} must be a matrix among the weights {', '.join(initial)}")


def _in_order(like: Weights, parts: Sequence[Weights]) -> Weights:
    everything = {key: value for part in parts for key, value in part.items()}
    return {key: everything[key] for key in like}


# the worker -------------------------------------------------------------------------------------------------------------


def _work(
    comm: Comm, config: ServerConfig, shards: Sequence[Shard], gradient: Gradient,
    steps: int | Callable[[Comm, int], bool], seconds: Callable[[int], float],
) -> int:  # fmt: skip
    """Compute, push, pull, until the last push. Receives are posted before anything is sent, so that no server's answer
    waits for a worker that is itself waiting for another server."""
    worker, clock = comm.rank - config.servers, 0
    weights: Weights = {key: value for shard in shards for key, value in shard.weights.items()}
    while True:
        contributions = gradient(worker, clock, weights)
        comm.compute(seconds=seconds(worker), name="gradient")
        last = clock + 1 >= steps if isinstance(steps, int) else steps(comm, clock)
        pulls = []
        if not last:
            with purpose("parameter_pull"):
                pulls = [comm.irecv(shard.flat, server) for server, shard in enumerate(shards)]
        with purpose("parameter_push"):
            messages = [_messages(shard, contributions, clock, last, worker) for shard in shards]
            comm.waitall([comm.isend(m, server) for server, parts in enumerate(messages) for m in parts])
        comm.waitall(pulls)
        clock += 1
        if last:
            return clock


def _messages(shard: Shard, contributions: Mapping[str, Any], clock: int, last: bool, worker: int) -> list[Array]:
    """What a push to one server consists of. Its head says what follows, and comes even if nothing does."""
    rows = [_rows(contributions[key], shard.shapes[key], key, worker, clock) for key in shard.sparse]
    head = xp.array([clock, int(last), *(r.ids.size for r in rows)], xp.int64)
    parts = [head]
    if shard.dense:
        for key in shard.dense:
            if contributions[key].shape != shard.shapes[key]:
                raise UsageError(
                    f"worker {worker}, clock {clock}: the gradient of {key!r} has shape {contributions[key].shape}, "
                    f"its weight {shard.shapes[key]}"
                )
        parts.append(xp.as_array(xp.concatenate([contributions[k].reshape(-1) for k in shard.dense]), shard.flat.dtype))
    for r in rows:
        if r.ids.size:
            parts += [xp.as_array(r.ids, xp.int64), xp.array(r.values, shard.flat.dtype)]
    return parts


def _rows(value: Any, shape: tuple[int, ...], key: str, worker: int, clock: int) -> Rows:
    if not isinstance(value, Rows):
        raise UsageError(
            f"worker {worker}, clock {clock}: the gradient of the sparse key {key!r} must be Rows(ids, values)"
        )
    if value.values.shape != (value.ids.size, shape[1]) or (
        value.ids.size and not 0 <= value.ids.min() <= value.ids.max() < shape[0]
    ):
        raise UsageError(
            f"worker {worker}, clock {clock}: rows {value.ids.tolist()} with values of shape {value.values.shape} for {key!r} "
            f"of shape {shape}; each id must be in 0..{shape[0] - 1} and have one row"
        )
    return value


# the server -------------------------------------------------------------------------------------------------------------


class Updates:
    """The state of one shard: applies contributions, counts versions. The server's and the replay's arithmetic."""

    def __init__(self, config: ServerConfig, shard: Shard) -> None:
        self.shard, self.config, self.version = shard, config, 0
        self.slices = [ParameterSlice(shard.weights[key].reshape(-1), None, key) for key in shard.keys]
        self.optimizer = config.optimizer(self.slices) if shard.keys else None

    def apply(self, gradients: Sequence[Array], staleness: int) -> None:
        """One update with the sum of the flat gradients, added in the order given."""
        total, *rest = gradients
        for gradient in rest:
            total = total + gradient
        for piece, view in zip(self.slices, self.shard.views(total).values(), strict=True):
            piece.grad = view.reshape(-1)
        if self.optimizer is not None:
            self.optimizer.lr_factor = 1 / max(1, staleness) if self.config.staleness_aware else 1.0
            self.optimizer.step()
        self.version += 1


class Server:
    """One server: receives pushes from whoever comes, applies them, answers those who may go on."""

    def __init__(self, comm: Comm, config: ServerConfig, shard: Shard) -> None:
        self.comm, self.config, self.shard = comm, config, shard
        self.bound, self.aggregate = parse_consistency(config.consistency)
        self.updates = Updates(config, shard)
        workers = range(comm.size - config.servers)
        self.done: dict[int, float] = dict.fromkeys(workers, 0)  # pushes of each worker; infinite after its last
        self.read = dict.fromkeys(workers, 0)  # the version that each worker computes with
        self.pending: dict[int, deque[Array]] = {w: deque() for w in workers}  # received, not yet applied
        self.waiting: dict[int, int] = {}  # worker -> the clock that it wants to start
        self.staleness: list[int] = []

    def serve(self) -> None:
        """Until every worker has pushed for the last time."""
        while min(self.done.values()) < inf:
            worker, clock, last = self._receive()
            self.done[worker] = inf if last else clock + 1
            self._apply(worker)
            if not last:
                self.waiting[worker] = clock + 1
            self._answer()

    def _receive(self) -> tuple[int, int, bool]:
        """The head from any worker, the rest from the same one."""
        shard = self.shard
        with purpose("parameter_push"):
            head = xp.empty(2 + len(shard.sparse), xp.int64)
            rank = self.comm.recv(head, ANY)
            clock, last, *touched = head.tolist()
            contributions: dict[str, Any] = {}
            if shard.dense:
                dense = xp.empty(sum(prod(shard.shapes[key]) for key in shard.dense), shard.flat.dtype, shard.flat)
                self.comm.recv(dense, rank)
                at = offsets([prod(shard.shapes[key]) for key in shard.dense])
                for i, key in enumerate(shard.dense):
                    contributions[key] = dense[at[i] : at[i + 1]].reshape(shard.shapes[key])
            for key, count in zip(shard.sparse, touched, strict=True):
                ids = xp.empty(count, xp.int64)
                values = xp.empty((count, shard.shapes[key][1]), shard.flat.dtype, shard.flat)
                if count:
                    self.comm.recv(ids, rank)
                    self.comm.recv(values, rank)
                contributions[key] = Rows(ids, values)
        worker = rank - self.config.servers
        self.pending[worker].append(shard.gradient(contributions))
        return worker, clock, bool(last)

    def _apply(self, worker: int) -> None:
        if not self.aggregate:
            self.staleness.append(self.updates.version - self.read[worker])
            self.updates.apply([self.pending[worker].popleft()], self.staleness[-1])
            return
        while any(self.pending.values()) and all(self.pending[w] or self.done[w] == inf for w in self.pending):
            self.updates.apply([queue.popleft() for queue in self.pending.values() if queue], 0)

    def _answer(self) -> None:
        """Send the weights to each waiting worker that is at most `bound` clocks ahead."""
        reached = self.updates.version if self.aggregate else min(self.done.values())
        for worker, clock in sorted(self.waiting.items()):
            if clock - reached <= self.bound:
                del self.waiting[worker]
                self.read[worker] = self.updates.version
                with purpose("parameter_pull"):
                    self.comm.send(self.shard.flat, self.config.servers + worker)


# the replay -------------------------------------------------------------------------------------------------------------


@dataclass
class ServerRecord:
    """What one server did. updates: the (worker, clock) pairs of each update; versions[worker, clock]: the version of its
    weights that the gradient was computed with; gaps: for each pull, how far the reader was ahead of the slowest."""

    updates: list[list[tuple[int, int]]]
    versions: dict[tuple[int, int], int]
    gaps: list[float]


def read_records(traces: Sequence[Trace], config: ServerConfig) -> list[ServerRecord]:
    """Each server's order from its trace: wildcard receives are pushes, sends between them are pulls.

    Written apart from the server's own bookkeeping. traces: of all ranks of a world whose ranks are the run's.
    """
    _, aggregate = parse_consistency(config.consistency)
    return [_read(trace, config.servers, trace.size - config.servers, aggregate) for trace in traces[: config.servers]]


def _read(trace: Trace, servers: int, workers: int, aggregate: bool) -> ServerRecord:
    pushes = [m.peer - servers for m in trace.messages if m.wildcard]
    total = [pushes.count(worker) for worker in range(workers)]
    seen = [0] * workers
    record = ServerRecord([], {(worker, 0): 0 for worker in range(workers)}, [])
    for message in trace.messages:
        if message.wildcard:
            worker = message.peer - servers
            seen[worker] += 1
            if not aggregate:
                record.updates.append([(worker, seen[worker] - 1)])
            while aggregate:
                clock = len(record.updates)
                parts = [(w, clock) for w in range(workers) if total[w] > clock]
                if not parts or any(seen[w] <= clock for w, _ in parts):
                    break
                record.updates.append(parts)
        elif message.kind == "send" and message.purpose == "parameter_pull" and message.operation == "message":
            worker = message.peer - servers
            record.versions[worker, seen[worker]] = len(record.updates)
            record.gaps.append(
                seen[worker] - min((n for n, t in zip(seen, total, strict=True) if n < t), default=seen[worker])
            )
    return record


def replay(records: Sequence[ServerRecord], config: ServerConfig, initial: Weights, gradient: Gradient) -> Weights:
    """The same updates in the recorded order, one after the other on one device. Sends nothing."""
    shards = make_shards(config, initial)
    states = [Updates(config, shard) for shard in shards]
    history = [[xp.array(shard.flat)] for shard in shards]
    gradients: dict[tuple[int, int], Mapping[str, Any]] = {}

    def ready(worker: int, clock: int) -> bool:
        if (worker, clock) not in gradients:
            versions = [record.versions[worker, clock] for record in records]
            if any(version >= len(h) for version, h in zip(versions, history, strict=True)):
                return False
            seen = [s.views(h[v]) for s, h, v in zip(shards, history, versions, strict=True)]
            gradients[worker, clock] = gradient(worker, clock, _in_order(initial, seen))
        return True

    moved = True
    while moved:
        moved = False
        for shard, state, record, past in zip(shards, states, records, history, strict=True):
            while state.version < len(record.updates) and all(ready(*part) for part in record.updates[state.version]):
                parts = record.updates[state.version]
                staleness = state.version - record.versions[parts[0]]
                state.apply([shard.gradient(gradients[part]) for part in parts], staleness)
                past.append(xp.array(shard.flat))
                moved = True
    for state, record in zip(states, records, strict=True):
        if state.version < len(record.updates):
            raise UsageError(
                f"the record is not that of a run: after {state.version} of {len(record.updates)} updates the next one needs "
                "weights that no update has made"
            )
    return _in_order(initial, [shard.weights for shard in shards])
