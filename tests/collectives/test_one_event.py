"""A collective call as one event: bytes, messages, time and memory are those of its messages, for every algorithm."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import collectives
from minidist.base.memory import account_memory
from minidist.collectives import one_event
from minidist.collectives.algorithms import ALGORITHMS, Call
from minidist.collectives.ring_event import FIRST_CHUNKS
from minidist.comm import SimWorld
from minidist.comm.sim.folded import FoldedWorld, Ports
from minidist.comm.sim.links import LinkModel
from minidist.core.base.layout import chunk_sizes

# Times of powers of two have no rounding. Two links, so that nodes of three ranks differ.
LINKS = {
    "uniform": LinkModel(alpha=2.0**-20, beta=2.0**-33),
    "nodes": LinkModel(link=lambda a, b: (2.0**-20, 2.0**-33 if a // 3 == b // 3 else 2.0**-30)),
}
CASES = [("barrier", "dissemination")] + [
    (operation, name)
    for operation, entries in ALGORITHMS.items()
    for name, entry in entries.items()
    if operation != "scatter" and not entry.is_users
]


def call(comm, operation, name, size):
    """Make one call; return the size of its result, the time, and the bytes of memory at its peak."""
    function = getattr(collectives, operation)
    with account_memory() as account:
        if operation == "barrier":
            result = function(comm)
        elif operation == "all_gather" or operation == "gather":
            counts = chunk_sizes(size, comm.size)
            result = function(comm, np.zeros(counts[comm.rank]), counts=counts, algorithm=name)
        elif operation == "all_to_all":
            result = function(comm, np.zeros(size // comm.size * comm.size), algorithm=name)
        else:
            result = function(comm, np.zeros(size), algorithm=name)
    return getattr(result, "size", None), comm.time(), account.peak


def totals(world):
    """Return the messages and bytes that all ranks sent."""
    return (
        sum(sum(trace.messages_by_purpose().values()) for trace in world.traces),
        sum(sum(trace.bytes_by_purpose().values()) for trace in world.traces),
    )


@pytest.mark.parametrize(("operation", "name"), CASES)
@settings(max_examples=10)
@given(ranks=st.integers(2, 7), size=st.integers(0, 40), links=st.sampled_from(sorted(LINKS)), first=st.integers(0, 3))
def test_one_event_equals_its_messages(operation, name, ranks, size, links, first):
    # One class, or two; the second one comes later.
    first = min(first, ranks - 1)
    classes = [range(first), range(first, ranks)] if first else [range(ranks)]

    def main(comm):
        comm.compute(seconds=2.0**-19 * (comm.rank >= first > 0))
        return call(comm, operation, name, size), call(comm, operation, name, size)

    whole = SimWorld(ranks, links=LINKS[links], record="totals")
    folded = FoldedWorld(ranks, classes, links=LINKS[links])
    expected, found = whole.run(main), folded.run(main)
    assert totals(folded) == totals(whole)
    for members in classes:
        (result, _, peak), _ = expected[members[0]]
        assert found[members[0]][0] == (result, max(expected[rank][0][1] for rank in members), peak)
        if not folded.uneven:
            assert all(found[rank] == found[members[0]] for rank in members)
            assert [times[1][1] for times in found] == [times[1][1] for times in expected]
    # The second call finds ports that are busy. Where a class goes on at its latest end, times are upper bounds.
    assert folded.end_time >= whole.end_time if folded.uneven else folded.end_time == whole.end_time


PORTS = st.tuples(*[st.integers(0, 40)] * 3).map(lambda ticks: Ports(*(tick * 2.0**-21 for tick in ticks)))


@pytest.mark.parametrize("operation", sorted(FIRST_CHUNKS))
@settings(max_examples=40)
@given(data=st.data(), begins=st.lists(PORTS, min_size=2, max_size=6), links=st.sampled_from(sorted(LINKS)))
def test_a_ring_for_all_ranks_at_once_equals_its_messages(operation, data, begins, links):
    """Ranks that begin at any time with ports that are busy, chunks of any sizes, and ports with an overhead."""
    n = len(begins)
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    model = replace(LINKS[links], overhead=data.draw(st.sampled_from([0.0, 2.0**-21])))
    entry = ALGORITHMS[operation]["ring"]
    if operation == "all_reduce":
        sizes = chunk_sizes(sum(sizes), n)
    described = one_event.Described(Call(operation, tuple(sizes)), "ring", entry.run, np.dtype(np.float64))
    arguments = described, "tensor_forward", model, tuple(range(n)), None, tuple(begins)

    at_once = one_event._trial.__wrapped__(*arguments)
    with patch.object(one_event, "_is_ring", lambda described: False):
        messages = one_event._trial.__wrapped__(*arguments)
    (outcome, memory), (expected, workspaces) = at_once, messages
    assert list(outcome.ends) == list(expected.ends)
    assert list(outcome.messages) == list(expected.messages)
    assert list(outcome.nbytes) == list(expected.nbytes)
    assert [{kind: n for kind, n in one.items() if n} for one in workspaces] == list(memory)


@pytest.mark.parametrize("name", ["binomial", "ring"])
def test_a_group_of_later_ranks_has_its_own_links(name):
    """Ranks 1 to 3 are on two nodes; numbered from 0, as in their group, they would be on one."""
    groups = [[0], [1, 2, 3]]

    def main(comm):
        part = comm.group(next(group for group in groups if comm.rank in group), "part")
        collectives.all_reduce(part, np.zeros(24), algorithm=name)
        return comm.time()

    whole = SimWorld(4, links=LINKS["nodes"], record="totals").run(main)
    folded = FoldedWorld(4, [range(1), range(1, 4)], links=LINKS["nodes"]).run(main)
    assert [folded[0], folded[1]] == [whole[0], max(whole[1:])]
