"""A rank that is killed: it stops, a rank that waits for it is notified and may go on, and the others go on."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld, explore
from minidist.comm.errors import UnmatchedMessageError
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import DeadlockError, RankDeadError, UsageError
from minidist.core.collectives import all_reduce
from minidist.core.comm import ANY
from minidist.report import draw
from tests.cases import each

SENDS = [0, 1 << 20]


def one(value=0.0):
    return np.array([float(value)])


def isolating(ranks, **options):
    return SimWorld(ranks, on_failure="isolate", **options)


def test_a_death_after_some_messages_may_be_planned_during_the_run_and_moved():
    def program(comm):
        sent = 0
        if comm.rank == 1:
            for after in (9, 2):  # the last one counts, and each message counts once
                comm.world.kill(1, after_messages=after)
            for sent in range(5):
                counts.append(sent)
                comm.send(one(), 0)
        else:
            with suppress(RankDeadError):
                for _ in range(5):
                    comm.recv(one(), 1)

    for world in (isolating(2), SimWorld(2)):
        counts = []
        with suppress(RankDeadError):
            world.run(program)
        assert (counts, list(world.dead)) == ([0, 1, 2], [1])


@pytest.mark.parametrize("eager_bytes", SENDS)
@pytest.mark.parametrize("early", [True, False])
def test_who_waits_on_it_by_name_is_told_and_goes_on(eager_bytes, early):
    """Blocked already when it dies, or asking only afterwards; receives and synchronous sends."""
    after = []

    def program(comm):
        if comm.rank == 2:
            if early:
                comm.recv(one(), 3)  # until 0 and 1 wait
            comm.world.kill(2)
            after.append("alive")
        if comm.rank == 3:
            if early:
                comm.compute(seconds=1.0)
                comm.send(one(), 2)
            return "done"
        if not early:
            comm.compute(seconds=1.0)
        ask, array = (comm.recv, one()) if comm.rank == 0 else (comm.send, np.zeros(1 << 18))  # more than is buffered
        with pytest.raises(RankDeadError, match=rf"rank {comm.rank}: its .* cannot complete: rank 2 died at") as error:
            ask(array, 2)
        assert error.value.rank == 2
        got = one(-1)
        comm.sendrecv(one(comm.rank), 1 - comm.rank, got, 1 - comm.rank)
        return got[0]

    world = isolating(4, eager_bytes=eager_bytes)
    assert world.run(program) == [1.0, 0.0, None, "done"]
    assert set(world.dead) == {2}
    assert not after


def test_the_news_takes_one_latency():
    def program(comm):
        if comm.rank == 0:
            comm.compute(seconds=3.0)
            comm.world.kill(0)
        with pytest.raises(RankDeadError):
            comm.recv(one(), 0)
        return comm.time()

    assert isolating(2, links=LinkModel(alpha=0.25, beta=0.0)).run(program) == [None, 3.25]


def test_in_the_picture_of_a_run_with_a_death_no_rank_waits_for_ever():
    def program(comm):
        request = comm.irecv(one(), 1 - comm.rank)
        if comm.rank == 0:
            comm.compute(seconds=1.0)
            comm.world.kill(0)
        with pytest.raises(RankDeadError):
            request.wait()

    world = isolating(2)
    world.run(program)
    assert all(message.end >= message.start >= 0 for trace in world.traces for message in trace.messages)
    assert "deadlock" not in draw("space-time", world.traces, {}).axes[0].get_title(loc="left")


def counting(comm):
    """Ranks 1.. send numbers to rank 0, which receives from any rank until each has said goodbye, or is dead."""
    if comm.rank:
        for value in (1.0, 2.0, 0.0):  # 0: goodbye
            comm.send(one(10 * comm.rank + value), 0)
        return "done"
    alive, got, box = set(range(1, comm.size)), [], one()
    while alive:
        try:
            source = comm.recv(box, ANY)
        except RankDeadError as error:
            alive.remove(error.rank)
            continue
        got.append(box[0])
        if box[0] % 10 == 0:
            alive.remove(source)
    return got


@each("eager_bytes", SENDS)
@each("after", [0, 1, 2])
def test_a_wildcard_goes_on_with_the_others_in_every_order(eager_bytes, after):
    """Killed before its `after`-th message: what it had sent arrives once, the others' numbers all do."""

    def run(chooser):
        world = isolating(3, chooser=chooser, eager_bytes=eager_bytes)
        world.kill(1, after_messages=after)
        return world.run(counting)

    orders = set()
    for got, killed, other in explore(run):
        assert (killed, other) == (None, "done")
        assert sorted(got) == [10 + v for v in (1, 2, 0)[:after]] + [20, 21, 22]
        assert [v for v in got if v < 20] == [11, 12][:after]  # in the order of their sends
        orders.add(tuple(got))
    if eager_bytes:
        assert len(orders) == [1, 4, 10][after]  # all interleavings of `after` messages among 3


def test_a_synchronous_send_that_was_not_received_is_gone_and_a_buffered_one_arrives():
    def program(comm):
        if comm.rank == 0:
            request = comm.isend(one(7), 1)
            comm.world.kill(0)
            request.wait()
        got = one()
        try:
            comm.recv(got, 0)
        except RankDeadError:
            return "gone"
        return got[0]

    assert isolating(2).run(program) == [None, "gone"]
    assert isolating(2, eager_bytes=8).run(program) == [None, 7.0]


def test_a_rank_may_kill_another_which_communicates_no_more():
    """Not even in its `finally`; and the rank that kills it goes on at once."""
    said = []

    def program(comm):
        if comm.rank == 0:
            try:
                comm.recv(one(), 1)
            finally:
                said.append("in finally")
                comm.send(one(), 1)
                said.append("after it")
        comm.compute(seconds=2.0)
        comm.world.kill(0)
        said.append("killed")
        with pytest.raises(RankDeadError):
            comm.recv(one(), 0)
        return dict(comm.world.dead)

    assert isolating(2).run(program) == [None, {0: 2.0}]
    assert said == ["in finally", "killed"]


def test_a_collective_that_a_rank_died_in_raises_in_its_wait_and_the_survivors_make_a_group():
    def program(comm):
        work = all_reduce(comm, one(comm.rank), async_op=True)
        if comm.rank == 1:
            comm.world.kill(1)
        with pytest.raises(RankDeadError):
            work.wait()
        survivors = comm.group([0, 2], "survivors")
        return all_reduce(survivors, one(comm.rank + 1))[0]

    assert isolating(3).run(program) == [4.0, None, 4.0]


def test_by_default_a_death_ends_the_run_as_under_mpi():
    def program(comm):
        if comm.rank == 1:
            comm.world.kill(1)
        comm.recv(one(), 1)

    with pytest.raises(RankDeadError, match=r'rank 1 was killed at virtual time 0 s and the run ends.*"isolate"'):
        SimWorld(2).run(program)
    world = SimWorld(3)
    world.kill(1, after_messages=1)
    with pytest.raises(RankDeadError, match="rank 1 was killed"):
        world.run(counting)


def test_the_living_are_still_watched():
    """A deadlock among them, and a message of theirs that is never received, are reported as ever."""

    def stuck(comm):
        if comm.rank == 2:
            comm.world.kill(2)
        comm.recv(one(), 1 - comm.rank)

    with pytest.raises(DeadlockError, match="2 of 3 ranks are blocked") as error:
        isolating(3).run(stuck)
    assert error.value.cycle == [0, 1]
    assert "rank 2 was killed at virtual time 0 s" in str(error.value)

    def stubborn(comm):
        if comm.rank == 2:
            with suppress(BaseException):  # it does not want to die
                comm.world.kill(2)
        elif comm.rank == 0:
            comm.recv(one(), 1)

    with pytest.raises(DeadlockError, match="1 of 3 ranks are blocked"):
        isolating(3).run(stubborn)

    def lost(comm):
        if comm.rank == 2:
            comm.world.kill(2)
        if comm.rank == 1:
            comm.send(one(), 0)

    with pytest.raises(UnmatchedMessageError, match=r"rank 1: its .* was never received"):
        isolating(3, eager_bytes=8).run(lost)


def test_of_each_death_a_wildcard_is_told_once():
    def program(comm):
        if comm.rank:
            comm.world.kill(comm.rank)
        for _ in range(2):
            with pytest.raises(RankDeadError, match="no other rank sends to it") as error:
                comm.recv(one(), ANY)
            heard.append(error.value.rank)
        comm.recv(one(), ANY)

    heard = []
    with pytest.raises(DeadlockError, match="1 of 3 ranks are blocked"):
        isolating(3).run(program)
    assert heard == [1, 2]


@given(st.integers(2, 5), st.data())
def test_wherever_it_dies_no_rank_hangs(ranks, data):
    """A rank dies at any message of a collective: every survivor ends with the sum or with the news."""
    victim, after = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 4 * (ranks - 1)))

    def program(comm):
        try:
            return all_reduce(comm, one(1.0))[0]
        except RankDeadError as error:
            comm.world.kill(comm.rank)  # gives up, so that no rank waits for it
            return error

    world = isolating(ranks, eager_bytes=data.draw(st.sampled_from(SENDS)))
    world.kill(victim, after_messages=after)
    results = world.run(program)
    assert (results[victim] is None) == (after < 4 * (ranks - 1))
    assert all(result in (None, ranks) for result in results)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SimWorld(2, on_failure="ignore"), 'must be "end" or "isolate"'),
        (lambda: isolating(2).kill(2), "ranks 0..1"),
        (lambda: isolating(2).kill(1), "outside a run"),
        (lambda: isolating(2).kill(1, after_messages=-1), "at least 0"),
    ],
)
def test_wrong_kills_are_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()
