"""A worker of a parameter server dies at any point: no update is lost or applied twice, and the others go on.

Every message of the victim (sends and receives) is once the one that it no longer posts, for every victim, in both send
modes; what must have been applied is read off the victim's own trace.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.comm.sim.choosers import earliest, explore, seeded
from minidist.core.base.errors import RankDeadError
from minidist.techniques import parameter_server as ps
from tests.cases import each
from tests.parallel.test_parameter_server import SENDS, config, drawn, gradient, initial, same, sparse_gradient


def run(cfg, workers, steps, deaths, compute=gradient, **options):
    """Run a world in which ranks die. deaths: {rank: messages that it still posts}."""
    world = SimWorld(cfg.servers + workers, on_failure="isolate", **options)
    for rank, messages in deaths.items():
        world.kill(rank, after_messages=messages)
    return world, world.run(ps.run, cfg, initial(), compute, steps)


def check(world, results, cfg, steps, compute=gradient):
    """The survivors' updates are all there, the dead ones' are those that came whole, each once; and the replay has the
    bits.
    """
    living = [rank for rank in range(world.size) if rank not in world.dead]
    assert min(world.dead, default=world.size) >= cfg.servers
    weights = results[living[0]].weights
    assert all(same(results[rank].weights, weights) for rank in living)
    records = ps.read_records(world.traces, cfg)
    assert same(ps.replay(records, cfg, initial(), compute), weights)
    bound, aggregate = ps.parse_consistency(cfg.consistency)
    for server, record in enumerate(records):
        applied = [part for update in record.updates for part in update]
        assert len(applied) == len(set(applied))
        for rank in range(cfg.servers, world.size):
            worker = rank - cfg.servers
            clocks = [clock for w, clock in applied if w == worker]
            least, most = (steps, steps) if rank in living else pushed(world, rank, server, cfg, steps, compute)
            assert clocks == list(range(len(clocks)))
            assert least <= len(clocks) <= most
        assert max(record.gaps, default=0) <= (bound + 1 if aggregate else bound)


def pushed(world, rank, server, cfg, steps, compute):
    """(least, most) pushes of a dead worker that the server must have applied, by the worker's own trace."""
    sends = [m for m in world.traces[rank].messages if m.purpose == "parameter_push" and m.peer == server]
    shard = ps.make_shards(cfg.servers, initial(), cfg.sparse)[server]
    sizes = []
    for clock in range(steps):
        contributions = compute(rank - cfg.servers, clock, initial())
        sizes.append(1 + bool(shard.dense) + 2 * sum(contributions[key].ids.size > 0 for key in shard.sparse))
    ends = np.cumsum(sizes)
    posted = int(np.searchsorted(ends, len(sends), side="right"))
    if world.eager_bytes:
        return posted, posted  # what was sent is on the wire and arrives
    pulls = sum(
        m.kind == "receive" and m.peer == server and m.purpose == "parameter_pull" for m in world.traces[rank].messages
    )
    return max(0, pulls - 1), posted  # it asked for the next weights: all pushes before had been received


def messages_of(cfg, workers, steps, rank, compute=gradient):
    world, _ = run(cfg, workers, steps, {}, compute)
    return len(world.traces[rank].messages)


CONSISTENCIES = ("bsp", "delay:1", "ssp:0", "ssp:1", "asp")


@each(("consistency", "servers"), list(itertools.product(CONSISTENCIES, (1, 2))), sampled=10)
def test_a_death_at_every_message_of_every_worker(consistency, servers):
    cfg, workers, steps = config(servers, consistency), 3, 3
    for victim in range(servers, servers + workers):
        for messages, eager_bytes in itertools.product(range(messages_of(cfg, workers, steps, victim)), SENDS):
            world, results = run(cfg, workers, steps, {victim: messages}, eager_bytes=eager_bytes)
            assert set(world.dead) == {victim}
            assert results[victim] is None
            check(world, results, cfg, steps)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1"])
@pytest.mark.parametrize("eager_bytes", SENDS)
def test_a_death_at_every_message_in_every_order(consistency, eager_bytes):
    cfg, steps, runs = config(1, consistency, "sgd"), 2, 0
    for messages in range(messages_of(cfg, 2, steps, 1)):
        for world, results in explore(
            lambda chooser, messages=messages: run(
                cfg, 2, steps, {1: messages}, chooser=chooser, eager_bytes=eager_bytes
            )
        ):
            check(world, results, cfg, steps)
            runs += 1
    assert runs > messages_of(cfg, 2, steps, 1)


def test_a_push_received_in_part_is_dropped_when_several_workers_die():
    """Several die at once, so that one server hears of a death in the middle of a push, another one before it."""
    cfg = config(2, "ssp:0", "sgd", sparse=frozenset(["table"]))
    for deaths in ({4: 4}, {4: 4, 3: 3}, {2: 10, 4: 5}, {2: 6, 3: 6, 4: 6}):
        for seed in range(3):
            world, results = run(cfg, 3, 3, deaths, sparse_gradient, chooser=seeded(seed), eager_bytes=1 << 20)
            check(world, results, cfg, 3, sparse_gradient)


@given(data=st.data())
@settings(max_examples=60)
def test_several_deaths_with_sparse_keys(data):
    servers, workers, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    consistency = data.draw(st.sampled_from(["bsp", "delay:2", "ssp:0", "ssp:2", "asp"]))
    cfg = config(servers, consistency, "adam", sparse=frozenset(["table"]))
    victims = data.draw(st.sets(st.integers(servers, servers + workers - 1)))
    deaths = {rank: data.draw(st.integers(0, 30)) for rank in sorted(victims)}
    world, results = run(
        cfg,
        workers,
        steps,
        deaths,
        sparse_gradient,
        chooser=data.draw(st.sampled_from([earliest, drawn(data)])),
        eager_bytes=data.draw(st.sampled_from(SENDS)),
    )
    check(world, results, cfg, steps, sparse_gradient)


def test_servers_and_workers_on_some_of_the_ranks_of_a_world():
    """The error names world ranks; the servers know theirs by the communicator."""
    cfg = config(1, "bsp")

    def program(comm):
        group = comm.group([2, 0, 3], "ps") if comm.rank != 1 else None
        return None if group is None else ps.run(group, cfg, initial(), gradient, 3).weights

    for victim, alone in ((3, 0), (0, 1)):  # world rank 3 is worker 1, world rank 0 is worker 0
        world = SimWorld(4, on_failure="isolate")
        world.kill(victim, after_messages=1)  # the initial weights, and no push
        results = world.run(program)
        whole = (
            SimWorld(2)
            .run(ps.run, cfg, initial(), lambda worker, clock, w, alone=alone: gradient(alone, clock, w), 3)[0]
            .weights
        )
        assert results[victim] is None
        assert same(results[2], whole)


def test_a_server_that_dies_ends_the_run_with_a_sentence():
    with pytest.raises(RankDeadError, match="rank 1 died"):
        run(config(2, "ssp:1"), 2, 5, {1: 9})
