"""The simulated world and MPI agree: the same bits, and for each rank and stream the same sequence of messages."""

import time

import numpy as np
import pytest

from minidist.base.traces import sequences
from minidist.comm import SimWorld, replay
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from minidist.core.comm import ANY
from tests.cases import each
from tests.comm import programs

PROGRAMS = ["every_collective", "two_levels", "groups_and_streams", "parts_of_calls", "messages_of_all_sizes"]
SENDS = {"synchronous": 0, "buffered": 1 << 30}


@each("sends", SENDS, sampled=8)
@each("ranks", [2, 3, 4, 8])
@each("name", PROGRAMS)
def test_the_programs_run_in_the_simulated_world(name, ranks, sends):
    SimWorld(ranks, eager_bytes=SENDS[sends]).run(getattr(programs, name))


def simulated(comm, name):
    """What this rank must get and do. Rank 0 simulates for all; the others sleep, as waiting inside MPI would take its
    core.
    """
    base = comm.world.base
    if comm.rank == 0:
        world = SimWorld(comm.size)
        pairs = list(zip(world.run(getattr(programs, name)), [sequences(trace) for trace in world.traces], strict=True))
        for rank in range(1, comm.size):
            base.send(pairs[rank], rank)
        return pairs[0]
    while not base.iprobe(0):
        time.sleep(0.002)
    return base.recv(source=0)


def check(comm, name):
    result, expected = simulated(comm, name)
    assert getattr(programs, name)(comm) == result
    assert sequences(comm.trace) == expected


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_2_ranks(comm, name):
    check(comm, name)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_3_ranks(comm, name):
    check(comm, name)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_4_ranks(comm, name):
    check(comm, name)


@pytest.mark.mpi(3)
def test_a_run_with_wildcards_is_replayed_to_the_same_bits(comm):
    real = programs.wildcards(comm)
    traces = comm.world.base.allgather(comm.trace)
    digests = comm.world.base.allgather(real)
    world = SimWorld(comm.size, chooser=replay(traces), eager_bytes=1 << 20)
    assert world.run(programs.wildcards) == digests
    assert [sequences(t) for t in world.traces] == [sequences(t) for t in traces]


@pytest.mark.mpi(3)
def test_a_wildcard_does_not_wait_for_the_receives_before_it(comm):
    assert programs.any_while_others_are_late(comm) == SimWorld(3).run(programs.any_while_others_are_late)[comm.rank]


@pytest.mark.mpi(2)
def test_large_sends_with_receives_posted_early(comm):
    """irecv, send, wait of 4 MiB on both ranks: MPI promises that this ends, and headers must not break the promise."""
    got = np.zeros(1 << 20, np.float32)
    request = comm.irecv(got, 1 - comm.rank)
    comm.send(np.full(1 << 20, comm.rank + 1, np.float32), 1 - comm.rank)
    request.wait()
    assert (got == 2 - comm.rank).all()


@pytest.mark.mpi(2)
def test_payloads_are_asked_for_in_the_order_of_their_headers(comm):
    """Even when MPI reports the second header first, as it may."""
    got = [np.zeros(1), np.zeros(1)]
    if comm.rank == 0:
        for value in (1.0, 2.0):
            comm.send(np.array([value]), 1)
        return
    requests = [comm.irecv(array, 0) for array in got]
    requests[1].header_request.Wait()
    comm.world._header_came(requests[1], 0)
    comm.waitall(requests[::-1])
    assert (got[0][0], got[1][0]) == (1.0, 2.0)


@pytest.mark.mpi(2)
def test_the_bytes_of_the_headers_are_recorded(comm):
    programs.groups_and_streams(comm)
    assert {message.header_bytes for message in comm.trace.messages} == {64}


@pytest.mark.mpi(2)
def test_without_checks_there_are_no_headers(comm):
    from minidist.comm.mpi.world import MPIWorld

    world = MPIWorld(checks=False, record=True, timeout=0)
    programs.every_collective(world.comm)
    programs.groups_and_streams(world.comm)
    assert all(message.header_bytes == 0 for message in world.trace.messages)
    programs.messages_of_all_sizes(world.comm)
    world.finish()
    world.close()


def unchecked_world():
    """Return a world and a list: of each sendrecv the call, its tag, and whether it was one of MPI's."""
    from minidist.comm.mpi.direct import DirectCall, DirectComm, DirectMessages
    from minidist.comm.mpi.world import MPIWorld

    exchanged = []

    class Watched(DirectMessages):
        def sendrecv(self, outgoing, dest, incoming, source, tag=None):
            before = self.world.posted
            super().sendrecv(outgoing, dest, incoming, source, tag)
            exchanged.append((id(self), self.tag, self.world.posted == before))

    class WatchedCall(Watched, DirectCall):
        pass

    class WatchedComm(Watched, DirectComm):
        call_class = WatchedCall

    class World(MPIWorld):
        direct, posted = WatchedComm, 0

        def post(self, *arguments):
            self.posted += 1
            return super().post(*arguments)

    return World(checks=False, record=False, timeout=0), exchanged


def unchecked(comm):
    """Without checks and record a sendrecv goes straight to MPI: the same bits, and as many messages."""
    world, exchanged = unchecked_world()
    for name in PROGRAMS:
        simulated = SimWorld(comm.size)
        assert getattr(programs, name)(world.comm) == simulated.run(getattr(programs, name))[comm.rank]
        if name == "every_collective":
            assert sum(world.sent) == len(simulated.traces[comm.rank].sent())
    assert sum(direct for _, _, direct in exchanged) > 20
    world.finish()
    world.close()


@pytest.mark.mpi(2)
def test_an_unchecked_world_numbers_calls_that_share_an_object(comm):
    """Equal calls are one object with the next number each; one that is running in a stream is not used again."""
    world, calls = unchecked_world()
    array = np.ones(3)
    for _ in range(3):
        all_reduce(world.comm, array, algorithm="recursive_doubling")
    work = all_reduce(world.comm, array, algorithm="recursive_doubling", async_op=True)
    all_reduce(world.comm, np.ones(3), algorithm="recursive_doubling")
    work.wait()
    blocking = [call for call in calls if call[0] == calls[0][0]]
    assert array.tolist() == [16.0] * 3
    assert [number - calls[0][1] for _, number, _ in blocking] == [0, 1, 2, 4]
    world.finish()
    world.close()


@pytest.mark.mpi(2)
def test_an_unchecked_world_checks_what_is_unlike_its_last_call(comm):
    """Another shape, dtype, operation or algorithm gives the right result, and what cannot be summed is refused."""
    world, exchanged = unchecked_world()
    steps = {"recursive_doubling": 1, "ring": 2}
    for shape, dtype, op, algorithm, expected in (
        ((4,), np.float32, "sum", "recursive_doubling", 3),
        ((2, 2), np.float32, "sum", "recursive_doubling", 3),
        ((2, 2), np.float64, "sum", "recursive_doubling", 3),
        ((6,), np.float64, "max", "recursive_doubling", 2),
        ((6,), np.float64, "max", "auto", 2),
        ((6,), np.float64, "max", "ring", 2),
    ):
        for _ in range(2):
            array, before = np.full(shape, comm.rank + 1, dtype), len(exchanged)
            assert all_reduce(world.comm, array, op, algorithm=algorithm) is array
            assert len(exchanged) - before == steps.get(algorithm, len(exchanged) - before)
            assert np.array_equal(array, np.full(shape, expected, dtype))
    fixed = np.ones(6)
    fixed.flags.writeable = False
    for wrong, algorithm in (
        (np.ones(12)[::2], "ring"),
        (fixed, "ring"),
        (np.ones(6, complex), "ring"),
        (np.ones(6), []),
    ):
        with pytest.raises(UsageError):
            all_reduce(world.comm, wrong, "max", algorithm=algorithm)
    world.finish()
    world.close()


@pytest.mark.mpi(2)
def test_an_unchecked_world_of_2(comm):
    unchecked(comm)


@pytest.mark.mpi(3)
def test_an_unchecked_world_of_3(comm):
    unchecked(comm)


@pytest.mark.mpi(4)
def test_an_unchecked_world_of_4(comm):
    unchecked(comm)


@pytest.mark.mpi(2)
def test_without_a_record_nothing_is_kept(comm):
    from minidist.comm.mpi.world import MPIWorld

    world = MPIWorld(record=False, timeout=0)
    for _ in range(3):
        programs.groups_and_streams(world.comm)
    assert not world.trace.messages
    assert not world.expected
    assert not world.unwaited
    assert not world.active
    world.finish()
    world.close()


@pytest.mark.mpi(2)
def test_a_record_of_totals_has_the_bytes_and_no_events(comm):
    from minidist.comm.mpi.world import MPIWorld

    world = MPIWorld(record="totals", timeout=0)
    programs.groups_and_streams(world.comm)
    programs.groups_and_streams(comm)
    assert world.trace.bytes_by_purpose() == comm.trace.bytes_by_purpose() != {}
    assert not world.trace.messages
    assert not world.trace.spans
    world.finish()
    world.close()


@pytest.mark.mpi(2, timeout=20)
def test_an_earlier_receive_from_any_rank_gets_the_earlier_message(comm):
    """Also where MPI reports the header of the later one first, which it may."""
    if comm.rank == 1:
        comm.send(np.array([1.0]), 0)
        comm.send(np.array([2.0]), 0)
        return
    first, second = np.zeros(1), np.zeros(1)
    requests = [comm.irecv(first, ANY), comm.irecv(second, 1)]
    while not all(request.header_request.Get_status() for request in requests):
        pass
    comm.world._header_came(requests[1], 1)
    comm.waitall(requests)
    assert (first[0], second[0]) == (1.0, 2.0)
    assert requests[0].peer == 1


@pytest.mark.parametrize("name", ["rank", "size", "members"])
def test_what_a_communicator_is_cannot_be_assigned(name):
    def main(comm):
        with pytest.raises(UsageError, match=rf"rank \d: comm.{name} = 0, at .*:\d+; what a communicator is"):
            setattr(comm, name, 0)
        comm.barrier()
        return comm.rank

    assert SimWorld(2).run(main) == [0, 1]
