"""Wildcard receives: every order is possible, exactly the possible ones are explored, and a recorded one comes back."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.trace_file import read_traces, write_traces
from minidist.base.traces import Trace, sequences
from minidist.comm import SimWorld, earliest, explore, replay, seeded
from minidist.comm.sim.choosers import Candidate
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import DeadlockError, MismatchError
from minidist.core.comm import ANY
from tests.cases import each


def server(comm, messages=1, seconds=None):
    """Rank 0 receives from any rank; returns the order. Each other rank sends `messages`."""
    if comm.rank == 0:
        got, order = np.zeros(1), []
        for _ in range(messages * (comm.size - 1)):
            order.append((comm.recv(got, ANY), int(got[0])))
        return order
    for i in range(messages):
        comm.compute(seconds=seconds[comm.rank] if seconds else 0.0)
        comm.send(np.array([float(i)]), 0)
    return None


def senders(order):
    return [sender for sender, _ in order]


def test_the_earliest_message_comes_first_by_the_virtual_clock():
    order = SimWorld(4).run(server, 1, [0, 3e-3, 1e-3, 2e-3])[0]
    assert senders(order) == [2, 3, 1]


def test_ties_go_to_the_smaller_rank_whatever_the_order_of_the_candidates():
    a, b, c = Candidate(1.0, 0, 2), Candidate(1.0, 0, 1), Candidate(2.0, 0, 0)
    for candidates in itertools.permutations([a, b, c]):
        assert candidates[earliest(candidates)] == b


@each(("ranks", "messages"), [(2, 3), (3, 1), (4, 1), (3, 2), (4, 2), (5, 1)])
@each("eager_bytes", [0, 8])
def test_explore_finds_every_order_exactly_once(ranks, messages, eager_bytes):
    """A sender's messages stay in order, so there are (messages x senders)! / (messages!)^senders orders."""
    orders = [
        tuple(order)
        for order in explore(
            lambda chooser: SimWorld(ranks, chooser=chooser, eager_bytes=eager_bytes).run(server, messages)[0]
        )
    ]
    count = math.factorial(messages * (ranks - 1)) // math.factorial(messages) ** (ranks - 1)
    assert len(orders) == len(set(orders)) == count


def test_explore_finds_the_one_order_that_deadlocks():
    """Rank 0 takes one message from any rank and one from rank 1: right only when the first was rank 2's."""

    def program(comm):
        got = np.zeros(1)
        if comm.rank == 0:
            first = comm.recv(got, ANY)
            comm.recv(got, 1)
            return first
        return comm.send(got, 0)

    def run(chooser):
        try:
            return SimWorld(3, chooser=chooser).run(program)[0]
        except DeadlockError as error:
            return str(error)

    results = list(explore(run))
    assert sorted(map(str, results))[0] == "2"
    assert len(results) == 2
    assert any("deadlock" in str(result) for result in results)


def test_explore_says_when_it_is_too_much():
    with pytest.raises(RuntimeError, match="more than 3 orders"):
        list(explore(lambda chooser: SimWorld(4, chooser=chooser).run(server), limit=3))


def test_a_seed_gives_one_order_and_seeds_give_several():
    def order(seed):
        return tuple(senders(SimWorld(6, chooser=seeded(seed)).run(server)[0]))

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(20)}) > 10


@given(st.data())
def test_hypothesis_draws_orders(data):
    world = SimWorld(4, chooser=lambda candidates: data.draw(st.integers(0, len(candidates) - 1)))
    order = senders(world.run(server)[0])
    assert sorted(order) == [1, 2, 3]


def test_a_wildcard_posted_first_chooses_first():
    """Receives: any, then rank 1. Rank 1's first message goes to one of them, its second to the other, in order."""

    def program(comm):
        if comm.rank == 0:
            a, b = np.zeros(1), np.zeros(1)
            from_any, rank1 = comm.irecv(a, ANY), comm.irecv(b, 1)
            comm.barrier()
            comm.waitall([rank1, from_any])
            return a[0], b[0]
        if comm.rank == 2:
            comm.barrier()
            return None
        requests = [comm.isend(np.array([float(i)]), 0) for i in (1, 2)]
        comm.barrier()
        comm.waitall(requests)
        return None

    for eager_bytes in (0, 8):
        assert SimWorld(3, eager_bytes=eager_bytes).run(program)[0] == (1, 2)


def test_a_wildcard_posted_first_chooses_first_among_messages_that_wait_already():
    def program(comm):
        if comm.rank == 0:
            comm.recv(np.empty(0), 1, tag=9)  # the other two messages are queued now
            a, b = np.zeros(1), np.zeros(1)
            from_any, rank1 = comm.irecv(a, ANY), comm.irecv(b, 1)
            comm.waitall([rank1, from_any])
            return a[0], b[0]
        requests = [comm.isend(np.array([float(i)]), 0) for i in (1, 2)]
        comm.send(np.empty(0), 0, tag=9)
        comm.waitall(requests)
        return None

    assert SimWorld(2).run(program)[0] == (1, 2)


def test_a_specific_receive_posted_first_matches_first():
    def program(comm):
        if comm.rank == 0:
            a, b = np.zeros(1), np.zeros(1)
            rank1, from_any = comm.irecv(a, 1), comm.irecv(b, ANY)
            comm.waitall([from_any, rank1])
            return a[0], b[0]
        for i in (1, 2):
            comm.send(np.array([float(i)]), 0)
        return None

    assert SimWorld(2).run(program)[0] == (1, 2)


def test_a_wildcard_of_another_tag_or_communicator_is_not_in_the_way():
    def program(comm):
        other = comm.dup()
        if comm.rank == 0:
            got = [np.zeros(1) for _ in range(3)]
            wild = [comm.irecv(got[0], ANY, tag=1), other.irecv(got[1], ANY)]
            comm.recv(got[2], 1)
            comm.waitall(wild)
            return [int(g[0]) for g in got]
        comm.send(np.array([2.0]), 0)
        other.send(np.array([1.0]), 0)
        return comm.send(np.array([0.0]), 0, tag=1)

    assert SimWorld(2).run(program)[0] == [0, 1, 2]


def two_servers(comm):
    """Rank 0 waits for the later tag first; the order of matches is not that of the posts."""
    got = [np.zeros(1) for _ in range(4)]
    if comm.rank == 0:
        first = [comm.irecv(got[i], ANY, tag=1) for i in range(2)]
        second = [comm.irecv(got[i], ANY, tag=2) for i in range(2, 4)]
        comm.waitall(second)
        for peer in (1, 2):
            comm.send(np.zeros(1), peer, tag=3)
        comm.waitall(first)
        return [(request.peer, int(g[0])) for request, g in zip([*first, *second], got, strict=True)]
    comm.send(np.array([10.0 + comm.rank]), 0, tag=2)
    comm.recv(got[0], 0, tag=3)
    return comm.send(np.array([20.0 + comm.rank]), 0, tag=1)


@each("program", [two_servers, server])
@each("seed", range(5))
def test_a_recorded_order_comes_back(program, seed, tmp_path):
    """Through a file, as from an MPI run."""
    world = SimWorld(3, chooser=seeded(seed))
    result = world.run(program)[0]
    traces, _ = read_traces(write_traces(tmp_path / "trace.jsonl", world.traces))
    again = SimWorld(3, chooser=replay(traces))
    assert again.run(program)[0] == result
    assert [sequences(t) for t in again.traces] == [sequences(t) for t in world.traces]


def test_a_record_of_another_program_cannot_be_replayed():
    world = SimWorld(3, chooser=seeded(1))
    world.run(server)
    with pytest.raises(MismatchError, match="same program on the same number of ranks"):
        SimWorld(3, chooser=replay([Trace(0, 3)])).run(server)
    with pytest.raises(MismatchError):
        SimWorld(3, chooser=replay(world.traces)).run(server, 2)


def test_the_time_of_a_wildcard_does_not_depend_on_who_ran_first():
    links = LinkModel(alpha=1e-3, beta=0.0)
    world = SimWorld(3, links=links)
    world.run(server, 1, [0, 5e-3, 1e-3])
    assert [message.end for message in world.traces[0].messages] == pytest.approx([2e-3, 6e-3])


def test_a_server_of_many():
    began = time.process_time()
    order = SimWorld(400, eager_bytes=8).run(server)[0]
    assert sorted(senders(order)) == list(range(1, 400))
    assert time.process_time() - began < 5
