"""One rank stands for its class: rings, messages between classes, and what cannot be folded."""

import numpy as np
import pytest

from minidist.collectives import barrier
from minidist.comm import SimWorld
from minidist.comm.sim.folded import FoldedWorld, others_of, seen_from
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import DeadlockError, UsageError
from minidist.core.collectives import all_gather, all_reduce
from minidist.core.comm import Mesh

# Powers of two: sums of times have no rounding, so equal times are equal numbers.
LINKS = LinkModel(alpha=2.0**-20, beta=2.0**-33)


def sums(world):
    """Return (bytes, messages) of all ranks by purpose."""
    nbytes, messages = {}, {}
    for trace in world.traces:
        for name, count in trace.bytes_by_purpose().items():
            nbytes[name] = nbytes.get(name, 0) + count
        for name, count in trace.messages_by_purpose().items():
            messages[name] = messages.get(name, 0) + count
    return nbytes, messages


def assert_equal_when_folded(main, ranks, classes):
    """Assert that results, bytes, messages and the time of every rank are those of the world with all ranks."""
    whole = SimWorld(ranks, links=LINKS, record="totals")
    folded = FoldedWorld(ranks, classes, links=LINKS)
    assert folded.run(main) == whole.run(main)
    assert sums(folded) == sums(whole)
    assert folded.end_time == whole.end_time
    assert not folded.uneven


def test_messages_round_a_ring():
    def main(comm):
        seen = []
        for distance in (1, 3):
            got = np.zeros(8 * distance)
            place = comm.rank
            comm.sendrecv(np.ones(8 * distance), (place + distance) % comm.size, got, (place - distance) % comm.size)
            comm.compute(seconds=2.0**-18)
            seen.append((got.sum(), comm.time()))
        return seen

    assert_equal_when_folded(main, 5, [range(5)])


def test_messages_between_classes():
    def main(comm):
        stage, place = divmod(comm.rank, 4)
        stages = comm.group([place, place + 4, place + 8], f"stages{place}")
        peers = comm.group(range(4 * stage, 4 * stage + 4), f"peers{stage}")
        first = comm.rank // 2 * 2
        pair = comm.group([first, first + 1], f"pair{first}")
        for _ in range(2):
            comm.compute(seconds=(stage + 1) * 2.0**-19)
            if stage:
                stages.recv(np.zeros(100), stage - 1)
            if stage < 2:
                stages.send(np.zeros(100), stage + 1)
            all_reduce(peers, np.zeros(40 * (stage + 1)))
            all_reduce(pair, np.zeros(16))
            all_gather(stages, np.zeros(5))
        return comm.time()

    assert_equal_when_folded(main, 12, [range(4), range(4, 8), range(8, 12)])


def test_a_call_of_several_classes_waits_for_the_last_one():
    def main(comm):
        # The classes come at unlike times, once the second one first and once the other.
        for order in (0, 1):
            comm.compute(seconds=2.0**-18 * (comm.rank // 4 == order))
            all_reduce(comm, np.zeros(2), algorithm="recursive_doubling")
        return comm.time()

    assert_equal_when_folded(main, 8, [range(4), range(4, 8)])


def test_calls_on_a_stream_beside_the_program():
    def main(comm):
        works = [all_reduce(comm, np.zeros(40), async_op=True) for _ in range(3)]
        comm.compute(seconds=2.0**-19)
        for work in works:
            work.wait()
        return comm.time()

    assert_equal_when_folded(main, 4, [range(4)])


def test_a_barrier_of_several_classes():
    def main(comm):
        # Twice, and the second class comes later.
        for enter in (barrier, lambda comm: comm.barrier()):
            comm.compute(seconds=2.0**-18 * (comm.rank // 4))
            enter(comm)
        return comm.time()

    whole, folded = SimWorld(8, links=LINKS), FoldedWorld(8, [range(4), range(4, 8)], links=LINKS)
    times = whole.run(main)
    assert folded.run(main) == [max(times[:4])] * 4 + [max(times[4:])] * 4
    assert sums(folded) == sums(whole)


def test_a_communicator_seen_from_a_rank_that_does_not_run():
    def seen(comm):
        mesh = Mesh(comm, (2, 4), ("pp", "dp"))
        dp, pair = mesh["dp"], mesh["dp"].group([mesh["dp"].rank], "alone")
        return comm.rank, mesh.coordinate, list(dp.members), dp.rank, list(pair.members)

    expected = SimWorld(8).run(seen)

    def main(comm):
        others = others_of(comm)
        assert [seen(seen_from(comm, rank)) for rank in (comm.rank, *others)] == [
            expected[rank] for rank in (comm.rank, *others)
        ]
        return others

    assert FoldedWorld(8, [range(4), range(4, 8)]).run(main) == [[1, 2, 3]] * 4 + [[5, 6, 7]] * 4
    assert SimWorld(2).run(others_of) == [(), ()]


def test_nothing_can_be_sent_with_a_communicator_that_is_seen_from_another_rank():
    def main(comm):
        all_reduce(seen_from(comm, 1), np.zeros(2))

    with pytest.raises(UsageError, match="use the communicator that the rank itself has"):
        FoldedWorld(2, [range(2)]).run(main)


def test_unequal_chunks_end_at_the_time_of_the_slowest_rank():
    def main(comm):
        all_reduce(comm, np.zeros(10**6 + 1))
        return comm.time()

    whole, folded = SimWorld(3, links=LINKS), FoldedWorld(3, [range(3)], links=LINKS)
    times = whole.run(main)
    assert folded.run(main) == [max(times)] * 3
    assert len(set(times)) > 1
    assert folded.uneven == {"all_reduce/ring"}
    assert sums(folded) == sums(whole)


def test_messages_before_the_first_step_may_be_free():
    from minidist.core.base.trace import purpose

    def main(comm):
        with purpose("startup"):
            all_reduce(comm, np.zeros(30))
            comm.sendrecv(np.zeros(5), (comm.rank + 1) % 3, np.zeros(5), (comm.rank - 1) % 3)
        before = comm.time()
        all_reduce(comm, np.zeros(30))
        return before, comm.time() > before

    links = LinkModel(free_startup=True)
    for world in (SimWorld(3, links=links), FoldedWorld(3, [range(3)], links=links)):
        assert world.run(main) == [(0.0, True)] * 3
        assert sums(world)[1] == {"startup": 12 + 3, "user": 12}


def unlike_shapes(comm):
    comm.sendrecv(np.zeros(3), (comm.rank + 1) % 4, np.zeros(4), (comm.rank - 1) % 4)


def message_to_one_that_does_not_run(comm):
    if comm.rank == 0:
        comm.send(np.zeros(1), 3)


def from_any_rank(comm):
    comm.recv(np.zeros(1), -1)


def scattered(comm):
    from minidist.collectives import scatter

    scatter(comm, None, np.zeros(2), root=1)


@pytest.mark.parametrize(
    ("program", "classes", "sentence"),
    [
        (unlike_shapes, [range(4)], r"sends an array of shape \(3,\) and receives one of \(4,\), so the ranks differ"),
        (
            message_to_one_that_does_not_run,
            [[0, 1], [2, 3]],
            "rank 0 sends to or receives from rank 3, which is folded",
        ),
        (from_any_rank, [range(4)], "a receive from any rank cannot be folded"),
        (scattered, [range(4)], "scatter/naive of 2 elements cannot be folded"),
    ],
)
def test_what_cannot_be_folded_is_refused(program, classes, sentence):
    with pytest.raises(UsageError, match=sentence):
        FoldedWorld(4, classes).run(program)


def test_a_rank_that_waits_for_its_own_class_for_ever_is_a_deadlock():
    with pytest.raises(DeadlockError):
        FoldedWorld(2, [range(2)]).run(lambda comm: comm.recv(np.zeros(1), 1 - comm.rank))


def test_classes_name_every_rank_once():
    with pytest.raises(UsageError, match="do not name each of 3 ranks once"):
        FoldedWorld(3, [[0, 1]])
    with pytest.raises(UsageError, match="keeps no events"):
        FoldedWorld(2, [[0, 1]], record=True)
