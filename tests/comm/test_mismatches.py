"""In either world an argument of a collective that must not differ between ranks is an error, and no other is."""

import re

import numpy as np
import pytest

from minidist.collectives import gather, scatter
from minidist.comm import SimWorld
from minidist.core.base.errors import CommunicationError, MismatchError
from minidist.core.collectives import all_gather, all_reduce, reduce_scatter
from tests.cases import each
from tests.comm.mismatches import TABLE


@each("row", TABLE, ids=lambda row: row.name)
def test_simulated_ranks_that_disagree(row):
    with pytest.raises(CommunicationError) as caught:
        SimWorld(2).run(row.function)
    assert re.search(row.words, str(caught.value)), str(caught.value)
    assert "mismatches.py:" in str(caught.value)
    assert ("\n" in str(caught.value)) == ("hint" in row.words)


@each("row", [row for row in TABLE if "hint" not in row.words], ids=lambda row: row.name)
def test_simulated_ranks_that_disagree_and_whose_sends_are_buffered(row):
    with pytest.raises(CommunicationError) as caught:
        SimWorld(2, eager_bytes=1000).run(row.function)
    assert re.search(row.words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("algorithm", ["naive", "ring", "ordered", "recursive_halving"])
def test_counts_of_other_ranks_that_differ(algorithm):
    """Of a naive reduce-scatter rank 0 alone cuts the sum, and the others would get another part than they ask for."""

    def program(comm):
        reduce_scatter(comm, np.ones(6), counts=[2, 2, 2] if comm.rank < 2 else [3, 1, 2], algorithm=algorithm)

    words = rf"^counts differ: .*reduce_scatter/{algorithm} counts \[3, 1, 2\].* every rank must pass the same counts$"
    with pytest.raises(MismatchError, match=words):
        SimWorld(3).run(program)


def test_counts_of_many_ranks_are_compared_by_a_checksum():
    """The text of an operation stays short; that of two ranks differs all the same."""

    def program(comm):
        sizes = [3] * comm.size
        sizes[0], sizes[1 + comm.rank // 20] = 4, 2
        reduce_scatter(comm, np.ones(sum(sizes)), counts=sizes)

    with pytest.raises(
        MismatchError, match=r"^counts differ: .*reduce_scatter/ring counts #[0-9a-f]+ .*reduce_scatter"
    ):
        SimWorld(40).run(program)


def async_on_one_rank(comm):
    result = all_reduce(comm, np.ones(4), async_op=comm.rank == 0)
    return (result.wait() if comm.rank == 0 else result).tolist()


def waits_in_another_order(comm):
    works = [all_reduce(part, np.ones(4), async_op=True) for part in (comm, comm.dup())]
    return [work.wait().tolist() for work in works[:: 1 if comm.rank else -1]]


def counts_that_are_the_default(comm):
    return all_gather(comm, np.ones(2), counts=[2, 2] if comm.rank else None).tolist()


def counts_on_the_root_alone(comm):
    whole = gather(comm, np.ones(1 + comm.rank), counts=None if comm.rank else [1, 2])
    out = scatter(comm, whole, np.zeros(1 + comm.rank), counts=None if comm.rank else [1, 2])
    return out.sum()


@pytest.mark.parametrize(
    "program", [async_on_one_rank, waits_in_another_order, counts_that_are_the_default, counts_on_the_root_alone]
)
@pytest.mark.mpi(2)
def test_what_may_differ(comm, program):
    assert np.all(np.array(program(comm)) >= 1)
