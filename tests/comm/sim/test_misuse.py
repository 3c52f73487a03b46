"""What must never be silent in the simulated world: unlike groups, shared buffers, tags, worlds used wrongly."""

import inspect
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.base.traces import SpanEvent
from minidist.comm import SimWorld, buffers
from minidist.comm.buffers import OpenMessages
from minidist.comm.errors import BufferReuseError
from minidist.core.base.errors import DeadlockError, MismatchError, UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from tests.cases import each


def line(function, text):
    """Where `text` stands in `function`: test_misuse.py:<line>."""
    lines, first = inspect.getsourcelines(function)
    return f"test_misuse.py:{first + next(i for i, code in enumerate(lines) if text in code)}"


# --- groups ---


def unlike_groups(comm, ranks):
    part = comm.group(ranks[comm.rank], "part")
    return all_reduce(part, np.array([float(comm.rank)]))


@pytest.mark.parametrize(
    "ranks",
    [([0, 1], [1, 0]), ([0, 1, 2], [0, 1], [0, 1, 2]), ([0, 1, 2], [1, 2], [1, 2]), ([0, 1], [1, 2], [2, 0])],
    ids=str,
)
def test_ranks_that_make_a_group_of_unlike_members_are_told(ranks):
    """Each of [0, 1] and [1, 0] would be rank 0 of a separate group, and take the other's messages for its own."""
    words = r"^members differ: rank \d makes the communicator world\.1part of the world's ranks"
    with pytest.raises(MismatchError, match=words) as got:
        SimWorld(len(ranks)).run(unlike_groups, ranks)
    text = str(got.value)
    assert "every member must pass the same ranks in the same order" in text
    assert text.count(line(unlike_groups, "comm.group")) == 1
    assert all(str(members) in text for members in re.findall(r"\[[\d, ]+\]", text))
    assert len(set(re.findall(r"\[[\d, ]+\]", text))) == 2


def test_a_label_that_begins_with_a_digit_is_no_part_of_the_number():
    """Call 1 with the label "1x" and call 11 with the label "x" are two communicators."""

    def program(comm):
        groups = [comm.group([0, 1], label) for label in ["1x", *map(str, range(9)), "x"]]
        return {group.name for group in groups}

    assert all(len(names) == 11 for names in SimWorld(2).run(program))


def test_groups_of_one_label_that_share_no_rank_are_two_communicators():
    def program(comm):
        pair = [comm.rank - comm.rank % 2, comm.rank - comm.rank % 2 + 1]
        parts = [comm.group(pair, "pair"), comm.group(pair[::-1], "turned")]
        return [all_reduce(part, np.array([float(comm.rank)]))[0] for part in (*parts, parts[1].dup())]

    assert SimWorld(6).run(program) == [[1] * 3, [1] * 3, [5] * 3, [5] * 3, [9] * 3, [9] * 3]


def test_what_a_dead_rank_made_binds_no_rank():
    def program(comm):
        if comm.rank == 2:
            comm.group([0, 1, 2], "part")
            comm.world.kill(2)
        comm.compute(seconds=1.0)
        buffer = np.zeros(1)
        if comm.rank == 0:
            comm.send(buffer, 1)
        else:
            comm.recv(buffer, 0)
        part = comm.group([0, 1], "part")
        return all_reduce(part, np.ones(1))[0]

    class LastFirst(SimWorld):
        def _ready_queue(self, streams):
            return super()._ready_queue(streams[::-1])

    assert LastFirst(3, on_failure="isolate").run(program) == [2, 2, None]


# --- buffers ---


def both_ways(comm, first, second, blocking=False):
    """Each rank is to get the other's number; both posts use one buffer."""
    array, other = np.full(4, comm.rank + 1.0), 1 - comm.rank
    posts = {
        "receive": lambda: comm.irecv(array, other),
        "send": lambda: comm.isend(array, other),
        "part": lambda: comm.isend(array[2:3], other),
    }
    requests = [posts[first]()]
    if blocking:
        (comm.send if second == "send" else comm.recv)(array, other)
    else:
        requests.append(posts[second]())
    comm.waitall(requests)
    return array[0]


@each("eager_bytes", [0, 1 << 10])
@each("blocking", [False, True])
@each(
    ("first", "second", "words"),
    [
        ("receive", "send", "its send to rank .* is from memory of its receive from rank"),
        ("send", "receive", "its receive from rank .* is into memory of its send to rank"),
        ("part", "receive", "its receive from rank .* is into memory of its send to rank"),
    ],
)
def test_a_send_and_a_receive_on_one_buffer(first, second, words, blocking, eager_bytes):
    """Rank 0 would get its own number back, or a number that depends on who came first."""
    if eager_bytes and first != "receive":
        return  # a buffered send has left its buffer
    with pytest.raises(BufferReuseError, match=words) as caught:
        SimWorld(2, eager_bytes=eager_bytes).run(both_ways, first, second, blocking)
    assert "wait() first, or give each message a separate buffer" in str(caught.value)
    assert str(caught.value).count("test_misuse.py:") == 2


def test_one_buffer_may_be_sent_many_times_at_once_and_received_into_afterwards():
    def program(comm):
        array = np.arange(6.0) * (comm.rank == 0)
        if comm.rank == 0:
            sends = [comm.isend(piece, 1, tag) for tag, piece in enumerate((array, array[:3], array, array[2:]))]
            for send in (sends[2], sends[0], sends[3], sends[1]):
                comm.wait(send)
            comm.recv(array, 1)
            return array.sum()
        got = [np.zeros(6), np.zeros(3), np.zeros(6), np.zeros(4)]
        comm.waitall([comm.irecv(piece, 0, tag) for tag, piece in enumerate(got)])
        comm.send(got[2] + 1, 0)
        return [piece.sum() for piece in got]

    assert SimWorld(2).run(program) == [21, [15, 3, 15, 14]]


def test_the_buffer_of_a_buffered_send_may_be_freed_before_its_wait():
    """What is allocated next may lie in the same place; it is no part of the message."""

    def program(comm):
        sends, other = [], 1 - comm.rank
        for number in range(20):
            sends.append(comm.isend(np.full(10, float(number)), other, tag=number))
            got = np.empty(10)
            comm.recv(got, other, tag=number)
            assert (got == number).all()
        comm.waitall(sends)

    SimWorld(2, eager_bytes=1 << 10).run(program)


def test_a_receive_into_an_array_that_a_stream_works_on():
    """The stream would write into it while the message comes: what is there afterwards is a matter of luck."""

    def program(comm, wait_first):
        array, other = np.ones(4), np.full(2, 5.0)
        work = all_reduce(comm, array, async_op=True)
        if wait_first:
            work.wait()
        if comm.rank == 0:
            comm.recv(array[1:3], 1)
        else:
            comm.send(other, 0)
        return work.wait().tolist()

    with pytest.raises(BufferReuseError, match=r"rank 0: its receive .* is into memory of its all_reduce/ring"):
        SimWorld(2).run(program, False)
    assert SimWorld(2).run(program, True) == [[2, 5, 5, 2], [2, 2, 2, 2]]


def test_messages_that_share_memory_are_found_by_what_they_share():
    """Against the definition, with sends that overlap each other, and in any order of posts and waits."""
    random = np.random.default_rng(0)
    memory, kept, messages, refused = np.zeros(90, np.uint8), [], OpenMessages(), 0
    for number in range(2000):
        if kept and random.random() < 0.45:
            messages.close(kept.pop(int(random.integers(len(kept))))[2])
            continue
        start = int(random.integers(60))
        end = start + int(random.integers(1, 2 + number % 30))
        kind = "receive" if random.random() < 0.3 else "send"
        message = SimpleNamespace(array=memory[start:end], kind=kind, describe=lambda: "message")
        clash = any(a < end and start < b and "receive" in (kind, other.kind) for a, b, other in kept)
        refused += clash
        if clash:
            with pytest.raises(BufferReuseError):
                messages.add(0, message, True)
        else:
            messages.add(0, message, True)
            kept.append((start, end, message))
    assert 100 < refused < 1500


@pytest.mark.parametrize("same", [True, False])
def test_works_on_one_array_or_on_parts_of_it_follow_one_another(same):
    """A work changes what the next one in its stream begins with; that is no change by the program."""

    def program(comm):
        array = np.full(8, comm.rank + 1.0)
        other = np.zeros(3)
        pieces = [array] * 4 if same else [array[:5], array, array[3:], array[2:4]]
        works = [all_reduce(comm, pieces[0], async_op=True), all_reduce(comm, other, async_op=True)]
        works += [all_reduce(comm, piece, async_op=True) for piece in pieces[1:]]
        comm.sendrecv(np.zeros(1), 1 - comm.rank, np.zeros(1), 1 - comm.rank)
        for work in works:
            work.wait()
        return array.tolist()

    expected = np.full(8, 3.0)
    if same:
        expected *= 8
    else:
        expected = np.array([1, 1, 1, 1, 1, 0, 0, 0]) * 3.0 + np.array([0, 0, 0, 0, 0, 1, 1, 1]) * 1.5
        for part in (slice(0, 8), slice(3, 8), slice(2, 4)):
            expected[part] *= 2
    assert SimWorld(2).run(program) == [expected.tolist()] * 2


def test_two_streams_that_work_on_one_array_at_once():
    def main(comm):
        array, other = np.arange(12.0), comm.dup()
        works = [all_reduce(c, array, async_op=True) for c in (comm, other)]
        for work in works:
            work.wait()

    with pytest.raises(BufferReuseError, match=r"the buffer of its all_reduce/ring: send to rank .* was changed"):
        SimWorld(3).run(main)


def test_a_work_may_change_its_array_and_hand_it_to_another_stream():
    def program(comm):
        array, inner = np.ones(4), comm.dup()

        def twice():
            array[1:] += 1
            all_reduce(inner, array, async_op=True).wait()

        comm.collective("outer").run_async(twice, [array]).wait()
        return array.tolist()

    assert SimWorld(2).run(program) == [[2, 4, 4, 4]] * 2


# --- tags ---


def two_messages(comm, array, op):
    """An all-reduce of two ranks in two messages, which are told apart by their tags."""
    other = 1 - comm.rank
    half = array.size // 2
    got = [np.empty(half), np.empty(half)]
    sends = [comm.isend(array[:half].copy(), other), comm.isend(array[half:].copy(), other, tag=1)]
    receives = [comm.irecv(got[1], other, tag=1), comm.irecv(got[0], other, tag=0)]
    comm.waitall(receives + sends)
    array[:half] += got[0]
    array[half:] += got[1]
    return array


def test_tags_inside_a_collective_call_tell_messages_apart_in_every_call():
    """The second call has the number 1: its messages without a tag must not meet those of tag 1."""

    def program(comm):
        results = [two_messages(comm.collective("mine"), np.arange(4.0), "sum").tolist() for _ in range(4)]
        return [two_messages(comm, np.arange(4.0), "sum").tolist(), *results]

    assert SimWorld(2).run(program) == [[[0, 2, 4, 6]] * 5] * 2


def test_tags_inside_a_call_that_runs_beside_another_one():
    """Message 5 of call 0 and the messages of call 5 are on their way at once."""

    def program(comm):
        calls = [comm.collective("mine") for _ in range(6)]
        other = 1 - comm.rank
        got = [np.zeros(1), np.zeros(1)]
        requests = [calls[0].irecv(got[0], other, tag=5), calls[5].irecv(got[1], other)]
        requests += [calls[5].isend(np.array([5.0]), other), calls[0].isend(np.array([0.5]), other, tag=5)]
        for request in requests:
            request.wait()
        return [got[0][0], got[1][0]]

    assert SimWorld(2).run(program) == [[0.5, 5.0]] * 2


def test_a_report_says_both_numbers_of_such_a_tag():
    def program(comm):
        comm.barrier()
        call = comm.collective("mine")
        if comm.rank == 0:
            call.send(np.zeros(1), 1, tag=7)
        else:
            call.recv(np.zeros(1), 0, tag=8)

    with pytest.raises(Exception, match=r"mine: send to rank 1, tag 1 \(own tag 7\), 8 B") as caught:
        SimWorld(2).run(program)
    assert "waits for call 1 (own tag 8), mine, but queued from rank 0 is call 1 (own tag 7), mine" in str(caught.value)
    with pytest.raises(
        ValueError, match=r"rank 0: tag 256 is outside 0\.\.255 inside a collective call, at .*test_mis"
    ):
        SimWorld(1).run(lambda comm: comm.collective("mine").isend(np.zeros(1), 0, tag=256))


# --- what a report of a mismatch names ---


def test_a_mismatch_inside_a_collective_of_ones_own_names_its_line_once():
    def mine(comm, array):
        call = comm.collective("mine")
        if comm.rank == 0:
            call.send(array, 1)
        else:
            call.recv(array[:1], 0)

    def program(comm):
        mine(comm, np.zeros(2))

    with pytest.raises(MismatchError) as caught:
        SimWorld(2).run(program)
    text = str(caught.value)
    assert f"{line(mine, 'call.send')} (sender)" in text
    assert f"{line(mine, 'call.recv')} (receiver)" in text
    assert line(program, "mine(comm, np") not in text

    def same_line(comm):
        comm.collective("mine").sendrecv(np.zeros(2), 1 - comm.rank, np.zeros(1 + comm.rank), 1 - comm.rank)

    with pytest.raises(MismatchError) as caught:
        SimWorld(2).run(same_line)
    assert str(caught.value).count(line(same_line, "sendrecv")) == 1


# --- runs, ranks and threads ---


AFTER = {
    "a message": lambda comm: comm.send(np.ones(1), 0),
    "a collective": lambda comm: all_reduce(comm, np.ones(1)),
    "a collective in a stream": lambda comm: all_reduce(comm, np.ones(1), async_op=True),
    "a barrier": lambda comm: comm.barrier(),
    "a duplicate": lambda comm: comm.dup(),
    "a group": lambda comm: comm.group([0], "alone"),
    "computing": lambda comm: comm.compute(seconds=1.0),
}


@each("what", AFTER)
@each("again", [False, True])
def test_a_communicator_is_of_no_use_after_its_run(what, again):
    """On one rank a collective sends nothing, and would return as if all were well; also inside the next run."""
    kept, world = [], SimWorld(1)
    world.run(lambda comm: kept.append(comm) or comm.compute(seconds=2.0))

    def late(_):
        AFTER[what](kept[0])

    with pytest.raises(UsageError, match=r"used after its run has ended, at .*test_misuse\.py:\d+; communicate only"):
        world.run(late) if again else late(None)
    assert kept[0].time() == 2.0
    assert kept[0].trace.spans[0].end == 2.0


def test_a_request_and_a_work_are_of_no_use_after_their_run():
    def program(comm):
        kept.append(comm.irecv(np.zeros(1), 1 - comm.rank))
        kept.append(all_reduce(comm, np.ones(1), async_op=True))
        raise KeyError("over")

    kept = []
    with pytest.raises(KeyError):
        SimWorld(2).run(program)
    for late in kept:
        with pytest.raises(UsageError, match="used after its run has ended"):
            late.wait()


def test_a_run_inside_itself_is_refused_and_the_world_can_be_used_again():
    def outer(comm):
        return world.run(lambda inner: inner.rank)

    world = SimWorld(2)
    with pytest.raises(UsageError, match=r"SimWorld\.run inside its own run, at .*test_misuse.*make another SimWorld"):
        world.run(outer)
    assert world.run(lambda comm: comm.rank) == [0, 1]


def test_a_run_takes_a_function():
    with pytest.raises(UsageError, match=r"SimWorld\.run\('train'\); pass a function"):
        SimWorld(2).run("train")


def test_a_communicator_of_another_rank():
    def program(comm):
        kept.append(comm)
        comm.barrier()
        kept[0].send(np.ones(1), 0) if comm.rank else comm.recv(np.ones(1), 0)

    kept = []
    with pytest.raises(UsageError, match=r"rank 1 uses the communicator of rank 0, at .*test_misuse"):
        SimWorld(2).run(program)


def test_a_communicator_in_a_second_thread():
    def program(comm, call):
        caught = []

        def other():
            try:
                call(comm)
            except UsageError as error:
                caught.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return caught

    for call in (
        lambda comm: comm.send(np.ones(1), 0),
        lambda comm: comm.barrier(),
        lambda comm: all_reduce(comm, np.ones(1), async_op=True),
    ):
        [text], _ = SimWorld(2).run(program, call)
        assert text.startswith("rank 0: world is used in a second thread, at ")
        assert "async_op=True to overlap" in text


def test_an_exception_without_a_text_does_not_hide_the_report():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def program(comm):
        try:
            raise Silent
        except Silent:
            comm.recv(np.zeros(1), 1 - comm.rank)

    with pytest.raises(DeadlockError, match="Silent: <Silent without a text"):
        SimWorld(2).run(program)


# --- many works, long runs ---


@pytest.mark.parametrize("same", [True, False])
def test_the_price_of_watching_a_work_does_not_grow_with_the_works_that_wait(same, monkeypatch):
    """16,400 all-reduces at once took minutes: each hand-over looked at the arrays of all of them."""
    looks = []
    monkeypatch.setattr(buffers, "checksum", lambda array: looks.append(1) or 0)

    def program(comm):
        array = np.ones(2)
        works = [all_reduce(comm, array if same else np.ones(2), async_op=True) for _ in range(400)]
        for work in works:
            work.wait()

    SimWorld(2).run(program)
    assert len(looks) < 2 * 400 * 8


def test_a_record_of_totals_has_the_bytes_and_no_events():
    def program(comm):
        for _ in range(5):
            with purpose("metrics"):
                all_reduce(comm, np.ones(4), async_op=True).wait()
            comm.compute(seconds=1.0)
            comm.trace.add_span(SpanEvent(comm.rank, "main", "step", 0.0, 1.0, "step"))
        comm.barrier()

    full, totals = SimWorld(3), SimWorld(3, record="totals")
    full.run(program)
    totals.run(program)
    for all_of_it, trace in zip(full.traces, totals.traces, strict=True):
        assert trace.bytes_by_purpose() == all_of_it.bytes_by_purpose()
        assert trace.bytes_by_purpose()["metrics"] > 0
        assert (trace.messages, trace.spans, trace.memory) == ([], [], [])
        assert len(all_of_it.spans) == 10
    with pytest.raises(UsageError, match=r"record='some'; it must be True, False or \"totals\""):
        SimWorld(1, record="some")
