"""Ranges move to where they are needed: every element arrives, once, and the bytes are those that a rank lacked."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.base.errors import MismatchError
from minidist.core.base.trace import purpose
from minidist.parallel.redistribute import Piece, Range, lacking_bytes, redistribute, table_bytes, transfers

LENGTHS = {"a": 7, "b": 5, "c": 1}
DTYPES = {"a": np.float32, "b": np.float64, "c": np.bool_}


def tensor(name):
    return (np.arange(LENGTHS[name]) * 3 + len(name)).astype(DTYPES[name])


def cut(bounds, name):
    """Return the ranges [start, stop) between the sorted `bounds`."""
    ends = sorted({0, LENGTHS[name], *(bound % (LENGTHS[name] + 1) for bound in bounds)})
    return list(pairwise(ends))


@st.composite
def layouts(draw):
    """Draw (ranks, pieces that each has, pieces that each needs); every element has a holder."""
    ranks = draw(st.integers(1, 4))
    have, need = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    for name in LENGTHS:
        for start, stop in cut(draw(st.lists(st.integers(0, 9), max_size=3)), name):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                have[rank].append((name, start, stop))
        for start, stop in cut(draw(st.lists(st.integers(0, 9), max_size=3)), name):
            for rank in draw(st.lists(st.integers(0, ranks - 1), max_size=3)):  # twice on one rank, too
                need[rank].append((name, start, stop))
    return ranks, have, need


@settings(max_examples=40)
@given(layouts(), st.integers(1, 3))
def test_every_range_arrives_and_each_rank_gets_what_it_lacks(layout, stride):
    ranks, have, need = layout

    def main(comm):
        there = [Piece(name, a, b, tensor(name)[a:b].copy()) for name, a, b in have[comm.rank]]
        wanted = [Piece(name, a, b, np.zeros(b - a, DTYPES[name])) for name, a, b in need[comm.rank]]
        with purpose("checkpoint"):
            redistribute(comm, there, wanted, stride)
        for piece in wanted:
            assert np.array_equal(piece.values, tensor(piece.name)[piece.start : piece.stop])
        return lacking_bytes(there, wanted)

    world = SimWorld(ranks)
    lacking = world.run(main)
    ranges = sum(map(len, have)) + sum(map(len, need))
    sent = sum(trace.bytes_by_purpose().get("checkpoint", 0) for trace in world.traces)
    assert sent == sum(lacking) + table_bytes(ranges, ranks)

    # One message for each pair of ranks where one rank lacks what the other has.
    for trace in world.traces:
        peers = [message.peer for message in trace.sent("checkpoint") if not message.operation.startswith("all_gather")]
        assert len(peers) == len(set(peers))


def test_the_source_is_the_rank_itself_then_its_like_then_the_first():
    everywhere = [[Range(1, 0, 4)]] * 4
    assert transfers(everywhere, [[], [], [], [Range(1, 1, 3)]], stride=2) == {(3, 3): [(0, Range(1, 1, 3))]}
    others = [[Range(1, 0, 4)], [Range(1, 0, 4)], [], []]
    assert transfers(others, [[], [], [], [Range(1, 1, 3)]], stride=2) == {(1, 3): [(0, Range(1, 1, 3))]}
    assert transfers(others, [[], [], [], [Range(1, 1, 3)]], stride=3) == {(0, 3): [(0, Range(1, 1, 3))]}
    # A range whose halves two ranks have.
    halves = [[Range(1, 0, 2)], [Range(1, 2, 4)], []]
    assert transfers(halves, [[], [], [Range(1, 1, 3)]]) == {
        (0, 2): [(0, Range(1, 1, 2))],
        (1, 2): [(0, Range(1, 2, 3))],
    }


def test_a_range_that_no_rank_has():
    with pytest.raises(MismatchError, match="rank 1 needs elements 2 to 4 of a tensor, and no rank has them"):
        transfers([[Range(1, 0, 2)], []], [[], [Range(1, 0, 4)]])
