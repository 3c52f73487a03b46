"""The order of a sum, found from outside: sums whose order is written down, by libraries, and those without one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.collectives.summation_order import (
    NoOrder,
    Order,
    arranged,
    balanced,
    chain,
    evaluate,
    find_orders,
    strided,
    written,
)
from minidist.core.base.errors import UsageError
from tests.cases import each


def adds(tree):
    """Return a sum that adds in the order of the tree."""
    return lambda values: np.array([evaluate(tree, values[:, 0])])


@st.composite
def trees(draw):
    """Draw a tree over shuffled terms: two partial sums are joined until one is left."""
    parts = draw(st.permutations(range(draw(st.integers(1, 12)))))
    while len(parts) > 1:
        left = parts.pop(draw(st.integers(0, len(parts) - 1)))
        right = parts.pop(draw(st.integers(0, len(parts) - 1)))
        parts.append((left, right))
    return parts[0]


@given(trees(), st.sampled_from(["float16", "float32", "float64"]))
def test_any_tree_of_additions_is_found(tree, dtype):
    (found,) = find_orders(adds(tree), written(tree).count("+") + 1, dtype)
    assert arranged(found.tree) == arranged(tree)
    assert found.accumulator == dtype or found.terms < 3  # two numbers have the same sum in a wider dtype


@each(
    ("tree", "name", "text"),
    [
        (chain([0, 1, 2, 3]), "from left to right", "0 + 1 + 2 + 3"),
        (chain([3, 2, 1, 0]), "from right to left", "2 + 3 + 1 + 0"),
        (chain([1, 2, 3, 0]), "around a ring, from term 1", "1 + 2 + 3 + 0"),
        (balanced(range(6)), "in pairs, neighbours first", "1 + 2 + 0 + (4 + 5 + 3)"),
        (balanced(range(4)), "in pairs, neighbours first", "0 + 1 + (2 + 3)"),
        (strided(range(4)), "in pairs, the terms half of all apart first", "0 + 2 + (1 + 3)"),
        (((0, 3), (1, 2)), "", "0 + 3 + (1 + 2)"),
        ((0, 1), "", "0 + 1"),
    ],
)
def test_an_order_is_written_and_named(tree, name, text):
    (found,) = find_orders(adds(tree), written(tree).count("+") + 1)
    assert (found.name, str(found)) == (name, text)


def test_numpy_s_sum_has_eight_partial_sums():
    (found,) = find_orders(lambda values: np.array([np.sum(values[:, 0].copy())]), 19)
    lanes = [chain(range(first, 16, 8)) for first in range(8)]
    assert arranged(found.tree) == arranged(chain([balanced(lanes), 16, 17, 18]))


def test_partial_sums_in_a_wider_dtype_are_seen():
    def in_float32(values):
        return np.array([values[:, 0].astype(np.float32).cumsum()[-1].astype(np.float16)])

    (found,) = find_orders(in_float32, 6, "float16")
    assert found == Order(6, chain(range(6)), "float32")


def test_an_exact_sum_has_no_order():
    (found,) = find_orders(lambda values: np.array([math.fsum(values[:, 0])]), 5)
    assert (found.tree, found.name, found.accumulator) == (None, "", "exact")
    assert str(found).startswith("exact")


def test_results_of_one_call_can_have_different_orders():
    found = find_orders(lambda values: np.array([sum(values[:, 0]), sum(values[::-1, 0])]), 4)
    assert [order.name for order in found] == ["from left to right", "from right to left"]


def flaky():
    """A sum whose order changes from call to call."""
    random = np.random.Generator(np.random.PCG64(1))
    return lambda values: np.array([evaluate(chain(random.permutation(len(values)).tolist()), values[:, 0])])


@each(
    ("add", "part"),
    [
        (lambda values: np.array([values.max()]), "no order of additions"),
        (lambda values: np.array([values.mean()]), "not a mean"),
        (lambda values: np.array([np.sort(values[:, 0]).cumsum()[-1]]), "terms"),
        (lambda values: np.array([math.fsum(values[:2, 0]) + math.fsum(values[2:, 0])]), "more than two numbers"),
        (lambda values: np.array([values[:, 0].cumsum()[-1] * (1 + 2.0**-50 * (values.max() < 1e3))]), "more than add"),
        (flaky(), "terms|units|bits"),
    ],
)
def test_what_does_not_add_two_numbers_at_a_time_is_refused(add, part):
    with pytest.raises(NoOrder, match=part):
        find_orders(add, 8)


@pytest.mark.parametrize("terms", [0, 513])
def test_too_few_and_too_many_terms(terms):
    with pytest.raises(UsageError, match="1 to 512 terms"):
        find_orders(adds(0), terms)
