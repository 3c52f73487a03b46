"""With an overhead per message a root is a bottleneck: the clock, each formula, and what "auto" chooses."""

import numpy as np
import pytest

from minidist.collectives.auto import cheapest, choose, virtual_seconds
from minidist.collectives.closed_forms import seconds
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from tests.cases import each
from tests.collectives.cases import ALL, Case

ALPHA, BETA, OVERHEAD = 2.0**-10, 2.0**-20, 2.0**-12  # binary fractions: sums of them are exact
LINKS = LinkModel(ALPHA, BETA, overhead=OVERHEAD)


@each(("operation", "algorithm"), ALL)
@each("ranks", [2, 3, 5, 8])
def test_virtual_time_is_the_formula_with_the_overhead(operation, algorithm, ranks):
    counts = None if operation == "all_to_all" else (16,) * ranks
    case = Case(operation, algorithm, ranks, 16 * ranks, counts=counts, root=ranks // 2)
    nbytes = 8 * (sum(case.row(0)) if operation == "all_to_all" else 16 * ranks)
    world = SimWorld(ranks, links=LINKS)
    world.run(case.call)
    assert world.end_time == seconds(operation, algorithm, nbytes, ranks, ALPHA, BETA, OVERHEAD)


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "reduce"])
def test_every_segment_has_its_overhead(operation):
    nbytes = 3 * 2**18
    expected = seconds(operation, "segmented_ring", nbytes, 3, ALPHA, BETA, OVERHEAD)
    assert virtual_seconds(operation, "segmented_ring", 3, nbytes, LINKS) == expected
    assert expected > seconds(operation, "segmented_ring", nbytes, 3, ALPHA, BETA)


def one_after_the_other(comm):
    """Empty messages into rank 0, which receives them one after the other."""
    empty = np.empty(0)
    for source in range(1, comm.size) if comm.rank == 0 else ():
        comm.recv(empty, source)
    if comm.rank:
        comm.send(empty, 0)


def test_a_root_is_busy_with_every_message():
    """1,023 receives cost one latency without an overhead; with one they cost 1,022 overheads more."""
    times = {}
    for overhead in (0.0, OVERHEAD):
        world = SimWorld(1024, links=LinkModel(ALPHA, BETA, overhead=overhead), record=False)
        world.run(one_after_the_other)
        times[overhead] = world.end_time
    assert times == {0.0: ALPHA, OVERHEAD: ALPHA + 1022 * OVERHEAD}


def test_a_message_is_one_without_overhead_over_a_longer_one():
    """Overhead o, alpha and n bytes take the time of no overhead, alpha - o and n + o/beta bytes."""
    for operation, algorithm in [("all_reduce", "ring"), ("broadcast", "naive"), ("reduce", "binomial")]:
        longer = LinkModel(ALPHA - OVERHEAD, BETA)
        extra = int(OVERHEAD / BETA)
        pieces = 6 if algorithm == "ring" else 1  # of the array in one message
        assert virtual_seconds(operation, algorithm, 6, 600, LINKS) == virtual_seconds(
            operation, algorithm, 6, 600 + pieces * extra, longer
        )


def test_auto_does_not_send_short_arrays_through_a_root():
    assert cheapest("all_reduce", 8, 1024, 2e-6, 4e-11) == "recursive_doubling"
    assert cheapest("all_reduce", 8, 1024, 2e-6, 4e-11, overhead=0.0) == "naive"
    taken = SimWorld(16, links=LINKS).run(choose, "all_reduce", 8)
    assert set(taken) == {cheapest("all_reduce", 8, 16, ALPHA, BETA, OVERHEAD)} == {"recursive_doubling"}
    assert set(SimWorld(16).run(choose, "all_reduce", 8)) == {"naive"}


def test_an_overhead_is_a_part_of_the_latency():
    with pytest.raises(UsageError, match="it is a part of the latency alpha"):
        LinkModel(alpha=1e-6, overhead=2e-6)
    with pytest.raises(UsageError, match="overhead is -1"):
        LinkModel(overhead=-1.0)
