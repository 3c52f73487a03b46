"""Repeat a run on one device: the same updates, one after the other, in the order that the servers' traces recorded.

An asynchronous run has no fixed result to compare with. Its trace does say which gradients each update took and which
version of the weights each gradient was computed with, and from these one device gets the same bits.

Proved by: tests/parallel/test_parameter_server.py
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from minidist.base.traces import Trace
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.techniques.parameter_server.server import ServerConfig, Updates, parse_consistency
from minidist.techniques.parameter_server.server_job import FINAL
from minidist.techniques.parameter_server.server_shards import Weights, joined, make_shards
from minidist.techniques.parameter_server.worker import Gradient


@dataclass
class ServerRecord:
    """What one server did.

    updates: the (worker, clock) pairs of each update. versions[worker, clock]: the version of its weights that the
    gradient was computed with. gaps: for each pull, how far the reader was ahead of the slowest. times: of each update,
    when the head of the push that completed it was received.
    """

    updates: list[list[tuple[int, int]]]
    versions: dict[tuple[int, int], int]
    gaps: list[float]
    times: list[float] = field(default_factory=list)


def read_records(traces: Sequence[Trace], config: ServerConfig) -> list[ServerRecord]:
    """Read each server's order from its trace: wildcard receives are pushes, sends between them are pulls.

    It does not use the server's own bookkeeping, which it is there to check. traces: of all ranks of the run's world.
    """
    _, aggregate = parse_consistency(config.consistency)
    return [_read(trace, config.servers, trace.size - config.servers, aggregate) for trace in traces[: config.servers]]


def _read(trace: Trace, servers: int, workers: int, aggregate: bool) -> ServerRecord:
    """Read one server's trace, message by message."""
    # What the whole trace says: deaths, the pushes that count, and how many of them each worker made.
    deaths = _deaths(trace)
    whole = _whole_pushes(trace, servers, deaths)
    total = [0] * workers  # pushes of each worker in the whole run
    for place in whole:
        total[trace.messages[place].peer - servers] += 1

    # Where reading has got to.
    missed = {death.worker for death in deaths}  # dead, but the server does not know it yet
    seen = [0] * workers  # pushes of each worker so far
    record = ServerRecord([], {(worker, 0): 0 for worker in range(workers)}, [])

    def apply_clocks(time: float) -> None:
        """Record the updates of the clocks that are complete now (bsp and delay)."""
        while aggregate:
            # Complete when every worker that ever pushes this clock has done so, and the others' deaths are known.
            clock = len(record.updates)
            parts = [(w, clock) for w in range(workers) if total[w] > clock]
            if not parts or any(seen[w] <= clock for w in {*missed, *(w for w, _ in parts)}):
                break
            record.updates.append(parts)
            record.times.append(time)

    def notice_deaths(place: float) -> None:
        """Stop waiting for the workers whose death was known before message number `place`."""
        while deaths and deaths[0].known <= place:
            death = deaths.pop(0)
            missed.discard(death.worker)
            apply_clocks(death.time)

    for place, message in enumerate(trace.messages):
        notice_deaths(place)
        worker = message.peer - servers
        if place in whole:
            # A push: in asp and ssp a separate update, in bsp and delay a part of one.
            seen[worker] += 1
            if not aggregate:
                record.updates.append([(worker, seen[worker] - 1)])
                record.times.append(message.end)
            apply_clocks(message.end)
        elif message.kind == "send" and message.purpose == "parameter_pull" and message.tag != FINAL:
            # A pull: the worker's next gradient is computed with this version.
            record.versions[worker, seen[worker]] = len(record.updates)
            record.gaps.append(
                seen[worker] - min((n for n, t in zip(seen, total, strict=True) if n < t), default=seen[worker])
            )
    notice_deaths(inf)
    return record


@dataclass
class Death:
    """A worker that died before its last push: when its server knew, and whether it had received part of a push."""

    known: int  # messages of the server before that
    worker: int
    time: float
    half: bool


def _deaths(trace: Trace) -> list[Death]:
    pattern = re.compile(r"worker (\d+) is dead, known after (\d+) messages(, half a push thrown away)?")
    found = [(pattern.fullmatch(span.name), span.start) for span in trace.spans if span.category == "death"]
    return [Death(int(match[2]), int(match[1]), time, bool(match[3])) for match, time in found if match]


def _whole_pushes(trace: Trace, servers: int, deaths: Sequence[Death]) -> set[int]:
    """Return the places of the heads of pushes, without those that were dropped."""
    heads = {place for place, m in enumerate(trace.messages) if m.wildcard and m.peer >= 0}
    for death in deaths:
        # The head of the push that was received in part is the worker's last one before its death was known.
        if death.half:
            heads.discard(max(p for p in heads if p < death.known and trace.messages[p].peer == servers + death.worker))
    return heads


def replay(
    records: Sequence[ServerRecord],
    config: ServerConfig,
    initial: Weights,
    gradient: Gradient,
    observe: Callable[[int, Updates], None] = lambda server, updates: None,
) -> Weights:
    """Make the same updates in the recorded order, one after the other on one device. Sends nothing.

    observe(server, updates): called after each update with what that server has then.
    """
    # history[server][version]: its weights after `version` updates, for gradients that were computed with old ones.
    shards = make_shards(config.servers, initial, config.sparse)
    states = [Updates(config, shard, partial(observe, server)) for server, shard in enumerate(shards)]
    history = [[xp.array(shard.flat)] for shard in shards]
    gradients: dict[tuple[int, int], Mapping[str, Any]] = {}

    def ready(worker: int, clock: int) -> bool:
        """Compute gradient (worker, clock) if all versions that it needs exist; returns whether it is there."""
        # A gradient is computed once, whichever server asks for it first.
        if (worker, clock) not in gradients:
            # One version per server; all of them must have been made.
            versions = [record.versions[worker, clock] for record in records]
            if any(version >= len(h) for version, h in zip(versions, history, strict=True)):
                return False
            seen = [s.views(h[v]) for s, h, v in zip(shards, history, versions, strict=True)]
            gradients[worker, clock] = gradient(worker, clock, joined(initial, seen))
        return True

    # Let every server make the updates whose gradients can be computed, until none can go on.
    moved = True
    while moved:
        moved = False
        for shard, state, record, past in zip(shards, states, records, history, strict=True):
            while state.version < len(record.updates) and all(ready(*part) for part in record.updates[state.version]):
                parts = record.updates[state.version]
                staleness = state.version - record.versions[parts[0]]
                state.apply([shard.gradient(gradients[part]) for part in parts], parts[0][1], staleness)
                past.append(xp.array(shard.flat))
                moved = True

    # All updates of all servers were made, or the record contradicts itself.
    for state, record in zip(states, records, strict=True):
        if state.version < len(record.updates):
            raise UsageError(
                f"the record does not belong to a run: after {state.version} of {len(record.updates)} updates the next"
                " one needs weights that no update has made"
            )
    return joined(initial, [shard.weights for shard in shards])
