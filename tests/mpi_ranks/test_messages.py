"""Messages by MPI's rules: order, tags, sources, modes, probes, requests, and what is reported."""

import pickle
import re

import numpy as np
import pytest

from minidist.comm.errors import BufferReuseError
from minidist.comm.sim.choosers import explore, seeded
from minidist.core.base.errors import DeadlockError, MismatchError
from minidist.debug.mpi_ranks import matching
from tests.mpi_ranks.on_ranks import on_ranks


def test_messages_of_one_sender_keep_their_order():
    def main(comm, MPI):
        status = MPI.Status()
        if comm.rank == 0:
            for k, tag in enumerate((3, 7, 3, 7)):
                comm.isend(k, 1, tag)
            comm.Barrier()
            comm.isend("last", 1, 9).wait()
        else:
            late = comm.irecv(source=0, tag=9)  # an older receive that none of the four fits
            comm.Barrier()
            got = [comm.recv(source=0, tag=7), comm.recv(source=0, tag=MPI.ANY_TAG, status=status)]
            assert (got, status.tag, status.source) == ([1, 0], 3, 0)
            assert [comm.recv(), comm.recv(tag=7), late.wait()] == [2, 3, "last"]

    on_ranks(2, main)


def test_a_receive_of_any_tag_may_be_posted_before_its_send():
    def main(comm, MPI):
        if comm.rank:
            comm.send(comm.rank, 0, tag=comm.rank)
            return
        requests = [comm.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG), comm.irecv(source=2, tag=2)]
        assert MPI.Request.waitall(requests) == [1, 2]

    on_ranks(3, main)


def test_a_named_receive_leaves_the_message_to_an_older_one_from_any_rank():
    """Whatever the older one chooses; a later receive of another tag overtakes both."""

    def main(comm, MPI):
        if comm.rank:
            for tag in (5, 6):
                comm.isend((comm.rank, tag), 0, tag)
            if comm.rank == 1:
                comm.isend("second", 0, 5)
            return
        wild, named = comm.irecv(source=MPI.ANY_SOURCE, tag=5), comm.irecv(source=1, tag=5)
        other = comm.recv(source=1, tag=6)
        print(wild.wait(), named.wait(), other)

    printed = {tuple(run.outputs) for run in explore(lambda chooser: on_ranks(3, main, chooser=chooser))}
    first, second = "(1, 5) second (1, 6)\n", "(2, 5) (1, 5) (1, 6)\n"
    assert printed == {(first, "", ""), (second, "", "")}


def test_sends_wait_beyond_the_eager_limit_only():
    def main(comm, MPI):
        out, into = np.ones(8), np.empty(8)
        comm.Send(out, 1 - comm.rank)
        comm.Recv(into)
        assert into.sum() == 8

    on_ranks(2, main, eager_bytes=64)
    for limit in (0, 63):
        with pytest.raises(DeadlockError, match=r"circle: rank 0 -> rank 1") as error:
            on_ranks(2, main, eager_bytes=limit)
        assert len(re.findall(r"send to rank \d, tag 0, 64 B, at \S*test_messages.py:\d+", str(error.value))) == 2


def test_modes_of_a_send():
    def main(comm, MPI):
        other = 1 - comm.rank
        room = bytearray(8 + MPI.BSEND_OVERHEAD)
        with pytest.raises(MPI.Exception, match="attached buffer has 0 B"):
            comm.Bsend(np.ones(1), other)
        MPI.Attach_buffer(room)
        comm.Bsend(np.ones(1), other)  # waits for nobody
        assert MPI.Detach_buffer() is room
        request = comm.Issend(np.ones(1), other, 1)  # waits although it is short
        assert not request.Test()
        comm.Recv(np.empty(1), tag=0)
        comm.Recv(np.empty(1), tag=1)
        request.Wait()

    on_ranks(2, main, eager_bytes=1000)


def test_what_both_sides_say_must_agree():
    def run(sent, received, **keywords):
        def main(comm, MPI):
            status = MPI.Status()
            if comm.rank == 0:
                comm.Send(sent, 1)
            else:
                comm.Recv(received, 0, status=status)
                print(status.Get_count(MPI.DOUBLE), status.count, received[0])

        return on_ranks(2, main, **keywords)

    with pytest.raises(
        MismatchError, match=r"rank 0 sent float32\[4\], rank 1 receives float64\[2\] .*test_messages.py"
    ):
        run(np.ones(4, np.float32), np.ones(2))
    # A buffer may be longer than its message, and bytes have no type.
    assert run(np.full(2, 3.0), np.zeros(5)).outputs[1] == "2 16 3.0\n"
    assert run(np.full(2, 3.0), bytearray(16)).outputs[1] == "2 16 0\n"

    def main(comm, MPI):
        if comm.rank == 0:
            comm.Send(np.ones(3), 1)
            comm.send("x" * 40_000, 1)
        else:
            with pytest.raises(MPI.Exception, match=r"rank 1 receives at most 8 B at .*rank 0 sent 24 B") as error:
                comm.Recv(np.empty(1))
            assert error.value.Get_error_class() == MPI.ERR_TRUNCATE == error.value
            with pytest.raises(MPI.Exception, match=r"irecv without a buffer has room for 32768 B"):
                comm.irecv().wait()

    on_ranks(2, main)


def test_an_object_is_not_received_into_a_buffer_of_numbers():
    def run(send, receive):
        def main(comm, MPI):
            if comm.rank == 0:
                getattr(comm, send)(np.ones(3), 1)
            else:
                print(receive(comm))

        return on_ranks(2, main).outputs[1]

    object_meets = r"sent an object, rank 1 receives float64\[100\] at .*; send goes with recv"
    buffer_meets = r"sent float64\[3\], rank 1 receives an object at .*; send goes with recv"
    for send, receive, found in (
        ("send", lambda comm: comm.Recv(np.empty(100), 0), object_meets),
        ("Send", lambda comm: comm.recv(source=0), buffer_meets),
        ("Send", lambda comm: comm.irecv(source=0).wait(), buffer_meets),
        ("Send", lambda comm: comm.mprobe(source=0).recv(), buffer_meets),
    ):
        with pytest.raises(MismatchError, match=found):
            run(send, receive)

    # A program may unpickle for itself, and receive an object into a separate buffer.
    def unpickle(comm):
        buffer = bytearray(1000)
        comm.Recv(buffer, 0)
        return pickle.loads(buffer)

    for receive in (unpickle, lambda comm: comm.irecv(bytearray(1000), 0).wait()):
        assert run("send", receive) == "[1. 1. 1.]\n"


def test_a_buffer_belongs_to_its_message_until_the_wait():
    def main(comm, MPI):
        array = np.ones(4)
        if comm.rank == 0:
            request = comm.Isend(array, 1)
            array[:] = 7
            comm.Barrier()
            request.Wait()
        else:
            comm.Barrier()
            comm.Recv(array)

    with pytest.raises(BufferReuseError, match="changed while the operation was in flight"):
        on_ranks(2, main)


def test_probes_find_a_message_and_leave_it_or_take_it():
    def main(comm, MPI):
        status = MPI.Status()
        if comm.rank:
            comm.send([comm.rank] * 9, 0, tag=comm.rank)
            comm.Send(np.arange(3.0), 0, tag=9)
            return
        assert not comm.Iprobe(1, 77)
        comm.probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        assert comm.recv(source=status.source, tag=status.tag) == [status.source] * 9
        rest = 3 - status.source
        assert comm.recv(source=rest) == [rest] * 9
        message = comm.Mprobe(1, 9, status)
        assert not comm.Iprobe(1)  # nobody else can receive it
        array = np.empty(status.Get_count(MPI.DOUBLE))
        message.Recv(array)
        assert (array == [0, 1, 2]).all()
        assert not message
        comm.Improbe(2, 9).Irecv(array).Wait()
        assert comm.Probe(MPI.PROC_NULL, 0, status)
        assert status.source == MPI.PROC_NULL

    on_ranks(3, main)


def test_requests_in_all_their_forms():
    def main(comm, MPI):
        n = comm.size
        if comm.rank:
            comm.Barrier()
            comm.Send(np.array([comm.rank]), 0, comm.rank)
            comm.recv(source=0)
            if comm.rank == 1:
                comm.isend("now", 0, 8)
            comm.Barrier()
            return
        into = np.zeros((n, 1), int)
        requests = [MPI.REQUEST_NULL] + [comm.Irecv(into[r], r, MPI.ANY_TAG) for r in range(1, n)]
        assert MPI.Request.Testany(requests) == (MPI.UNDEFINED, False)
        assert MPI.Request.Testsome(requests) == []
        comm.Barrier()
        status = MPI.Status()
        first = MPI.Request.Waitany(requests, status)
        assert first == status.tag == status.source
        statuses = []
        some = MPI.Request.Waitsome(requests, statuses)
        assert [s.source for s in statuses] == some
        while not MPI.Request.Testall(requests):
            pass
        assert into[:, 0].tolist() == list(range(n))
        assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
        assert all(request == MPI.REQUEST_NULL for request in requests)
        for r in range(1, n):
            comm.isend(None, r).wait()
        mistake, named = comm.irecv(source=MPI.ANY_SOURCE, tag=8), comm.irecv(source=1, tag=8)
        comm.Barrier()
        mistake.Cancel()
        mistake.Wait(status)
        assert status.Is_cancelled()
        assert named.wait() == "now"  # the older receive kept it from its message

    on_ranks(4, main)


def test_persistent_operations_start_again():
    def main(comm, MPI):
        other, out, into = 1 - comm.rank, np.zeros(2), np.zeros(2)
        requests = [comm.Recv_init(into, other), comm.Send_init(out, other)]
        for k in range(3):
            out[:] = k
            MPI.Prequest.Startall(requests)
            with pytest.raises(MPI.Exception, match="under way"):
                requests[0].Start()
            MPI.Request.Waitall(requests)
            assert into.tolist() == [k, k]
        for request in requests:
            request.Free()

    on_ranks(2, main)


def test_both_at_once_and_nobody():
    def main(comm, MPI):
        status = MPI.Status()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        array = np.array([float(comm.rank)])
        comm.Sendrecv_replace(array, right, 0, left, 0, status)
        assert (array[0], status.source) == (left, left)
        assert comm.sendrecv(comm.rank, right, source=left) == left
        comm.Send(array, MPI.PROC_NULL)
        comm.Recv(array, MPI.PROC_NULL, status=status)
        assert (status.source, status.count, array[0]) == (MPI.PROC_NULL, 0, left)
        for wrong, name in ((comm.size, "ERR_RANK"), (0, "ERR_TAG")):
            with pytest.raises(MPI.Exception) as error:
                comm.send(1, wrong, tag=0 if wrong else -5)
            assert error.value.error_class == getattr(MPI, name)

    on_ranks(3, main)


def test_ranks_that_poll_for_ever_are_a_deadlock(monkeypatch):
    monkeypatch.setattr(matching, "IDLE_S", 0.0)
    monkeypatch.setattr(matching, "IDLE_ROUNDS", 20)

    def main(comm, MPI):
        if comm.rank:
            while not comm.Iprobe(0, 5):
                pass
        else:
            comm.irecv(source=1).wait()

    with pytest.raises(DeadlockError, match=r"rank 1 waits in probe from rank 0, tag 5"):
        on_ranks(2, main)


def test_what_is_left_open_is_said():
    def main(comm, MPI):
        if comm.rank == 0:
            comm.isend("nobody receives it", 1, 4)
            comm.isend("nobody waits", 1, 5)
        else:
            comm.recv(tag=5)

    world = on_ranks(2, main).world
    (lost,) = world.lost
    (unwaited,) = world.unwaited
    assert re.match(r"rank 0: its send to rank 1, tag 4, \d+ B, at \S+test_messages.py:\d+ was never received", lost)
    assert "tag 5" in unwaited
    assert seeded(0)([1]) == 0


def test_a_buffer_is_the_program_s_again_after_the_wait():
    """Its message has been matched before the wait, or has been cancelled."""

    def main(comm, MPI):
        array, into, other = np.ones(4), np.empty(4), 1 - comm.rank
        for _ in range(2):
            request = comm.Irecv(into, other)
            comm.Barrier()  # so that the receive is there before the send
            comm.Send(array, other)
            request.Wait()
            array, into = into, array
        request = comm.Irecv(array, other, 9)
        request.Cancel()
        request.Wait()
        comm.Sendrecv_replace(array, other, source=other)
        comm.Recv(array, MPI.PROC_NULL)

    on_ranks(2, main)
