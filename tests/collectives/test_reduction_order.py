"""The orders of reductions over ranks: found by calls, and equal to the trees that are written down independently."""

import re
import textwrap

import pytest

from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.reduction_order import find_reduction_orders, mpi_all_reduce, on_rank
from minidist.collectives.summation_order import arranged, chain
from minidist.core.base.errors import UsageError
from tests.cases import each
from tests.collectives.associations import association


@pytest.fixture
def mine(tmp_path):
    """FILE.py: of a user's reductions."""
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(
            """
            import numpy as np
            from minidist.core.collectives import all_gather, all_reduce

            def partial_sums(comm, terms):
                return all_reduce(comm, np.array([sum(terms)]), algorithm="ordered")

            def gathered(comm, terms):
                counts = [len(part) for part in np.array_split(range(6), comm.size)]
                return sum(all_gather(comm, terms, counts=counts))

            def local(terms):
                return sum(terms[::-1])

            def raises(terms):
                return terms[99]

            def word(terms):
                return "a word"

            def three(a, b, c):
                pass
            """
        )
    )
    return f"{path}:"


@each("ranks", [1, 2, 3, 4, 6])
@each("name", sorted(ALGORITHMS["all_reduce"]))
def test_every_all_reduce_adds_as_is_written_down(name, ranks):
    (found,) = find_reduction_orders(name, ranks=[ranks]).found
    assert all(orders == found.of_ranks[0] for orders in found.of_ranks)
    for element, order in enumerate(found.of_ranks[0]):
        assert arranged(order.tree) == arranged(association(name, ranks, (element + 1) % ranks))


@pytest.mark.parametrize("name", sorted(ALGORITHMS["reduce_scatter"]))
def test_every_reduce_scatter_adds_as_is_written_down(name):
    (found,) = find_reduction_orders(name, ranks=[4], operation="reduce_scatter").found
    for rank, orders in enumerate(found.of_ranks):
        assert [arranged(order.tree) for order in orders] == [arranged(association(name, 4, (rank + 1) % 4))]


@pytest.mark.parametrize("name", sorted(ALGORITHMS["reduce"]))
def test_every_reduce_adds_as_is_written_down_and_only_at_its_root(name):
    (found,) = find_reduction_orders(name, ranks=[5], operation="reduce", elements=1).found
    assert [len(orders) for orders in found.of_ranks] == [1, 0, 0, 0, 0]
    assert arranged(found.of_ranks[0][0].tree) == arranged(association(name, 5, 1, tree=True))


def test_an_ordered_sum_has_one_order_for_all_chunks_and_a_ring_has_not():
    ordered, ring = (find_reduction_orders(name, ranks=[3], elements=7) for name in ("ordered", "ring"))
    assert len(set(ordered.found[0].of_ranks[0])) == 1
    assert len(set(ring.found[0].of_ranks[0])) == 3
    assert [places for places, _ in ring.found[0].groups()] == ["elements 0-2", "elements 3-4", "elements 5-6"]


def test_what_depends_on_the_number_of_ranks_is_said(mine):
    report = find_reduction_orders(mine + "partial_sums", 6, [1, 2, 3])
    assert not report.same
    assert [str(each.of_ranks[0][0]) for each in report.found] == [
        "0 + 1 + 2 + 3 + 4 + 5",
        "0 + 1 + 2 + (3 + 4 + 5)",
        "0 + 1 + (2 + 3) + (4 + 5)",
    ]
    assert "1 and 2 add in different orders" in report.lines()[-1]


def test_a_sum_of_gathered_terms_does_not(mine):
    report = find_reduction_orders(mine + "gathered", 6, [1, 2, 3])
    assert report.same
    assert {order.tree for each in report.found for orders in each.of_ranks for order in orders} == {chain(range(6))}
    assert report.lines()[-1].startswith("The order does not depend")


def test_an_all_reduce_of_one_term_per_rank_with_other_chunks_is_the_same_only_if_it_is_ordered():
    whole = {name: find_reduction_orders(name, ranks=[4], elements=4).found[0] for name in ("ordered", "ring")}
    chunk = {name: find_reduction_orders(name, ranks=[4], elements=1).found[0] for name in ("ordered", "ring")}
    assert whole["ordered"].of_ranks[0][1:] == chunk["ordered"].of_ranks[0] * 3
    assert whole["ring"].of_ranks[0][1] != chunk["ring"].of_ranks[0][0]


def test_a_user_s_sum_without_ranks(mine):
    report = find_reduction_orders(mine + "local", 5)
    assert [order.name for order in report.found[0].of_ranks[0]] == ["from right to left"]
    assert report.lines() == [f"{mine}local adds 5 terms of float64:", "  3 + 4 + 2 + 1 + 0   from right to left"]


@pytest.mark.parametrize(
    ("function", "part"), [("raises", "IndexError"), ("word", "return a number"), ("three", "has 3 arguments")]
)
def test_a_wrong_function_is_one_sentence(function, part, mine):
    with pytest.raises(UsageError, match=part):
        find_reduction_orders(mine + function)


@each(
    ("source", "flags", "part"),
    [
        ("rign", {}, "did you mean 'ring'"),
        ("ring", {"terms": 3}, "--terms 3 on 4 ranks"),
        ("ring", {"terms": 65}, "1 to 64 terms"),
        ("ring", {"ranks": [4, 65]}, "1 to 64 terms"),
        ("ring", {"ranks": [0]}, "at least 1 rank"),
        ("ring", {"dtype": "int64"}, "--dtype 'int64'"),
        ("ring", {"operation": "all_gather"}, "--operation 'all_gather'"),
        ("numpy.sum", {"ranks": [2]}, "--ranks: numpy.sum"),
        ("numpy.sum", {"elements": 2}, "--elements: numpy.sum"),
        ("MPI_Allreduce", {}, "mpiexec -n 4 minidist order"),
    ],
)
def test_wrong_input_is_one_sentence(source, flags, part):
    with pytest.raises(UsageError, match=part):
        find_reduction_orders(source, **flags)


@pytest.mark.mpi(4)
def test_the_order_of_mpi_s_own_all_reduce_is_found(comm):
    orders = on_rank(comm, mpi_all_reduce, None, "float64", 3)
    assert len(orders) == 3
    assert [sorted(re.findall(r"\d+", str(order))) for order in orders] == [["0", "1", "2", "3"]] * 3
