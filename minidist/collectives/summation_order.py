"""In which order does a sum add its terms? The order is found from outside, by calling the sum.

Floating-point addition does not associate: (a + b) + c and a + (b + c) may differ in their last bits. Two sums of the
same terms have the same bits when they add in the same order, so the order explains why two results differ.

One call shows one fact about the order. Term i is a number so large that a small number that is added to it is lost,
term j is its negative, and all other terms are one unit:

    terms 0 to 3: big, 1, -big, 1      left to right: ((big + 1) - big) + 1 = 1      one unit is lost
    terms 0 to 3: big, -big, 1, 1      left to right: ((big - big) + 1) + 1 = 2      none is lost

The units that are left were added after the two large numbers had met. The number of all other terms is `met(i, j)`:
how many terms the smallest partial sum has that contains both i and j. The tree of additions follows from these
numbers: what meets term 0 in partial sums of 2, 3, ... terms are its neighbours, from the inside to the outside.

Source: Xie et al., "FPRev: Revealing the Order of Floating-Point Summation", arXiv:2411.00442, sections 4 and 5.

Proved by: tests/collectives/test_summation_order.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError

MAX_TERMS = 512  # of one sum; a sum from right to left is called once for each pair of terms
MAX_PAIRED_TERMS = 64  # of a sum over ranks, which is always called once for each pair of terms
DTYPES = ("float16", "float32", "float64")
TRIALS = 3  # sums of random numbers with which a tree is checked

Tree = int | tuple["Tree", "Tree"]  # a term's number, or two partial sums that are added
Sum = Callable[[np.ndarray], np.ndarray]  # terms of shape (terms, elements) -> the results, of shape (results,)
Met = Callable[[int, int], int]  # two terms -> how many terms the smallest partial sum with both has


class NoOrder(UsageError):
    """The sum is not made of additions of two numbers at a time, always in the same order."""


@dataclass(frozen=True)
class Order:
    """How one result is added.

    tree: nested pairs of term numbers; None when the sum is exact, so that no order shows. accumulator: the dtype of
    the partial sums, which can be wider than that of the terms.
    """

    terms: int
    tree: Tree | None
    accumulator: str

    def __str__(self) -> str:
        """Return the sum as one writes it, where a + b + c is (a + b) + c."""
        return "exact: rounded once, so that no order shows" if self.tree is None else written(self.tree)

    @property
    def name(self) -> str:
        """The order in words, or "" for an order without a name."""
        return "" if self.tree is None else named(self.tree, self.terms)


def find_orders(add: Sum, terms: int, dtype: str = "float64") -> list[Order]:
    """Return the order in which `add` sums `terms` numbers, for each of its results.

    add: called with arrays of shape (terms, 1) of `dtype`; it returns the results, of shape (results,). It is called
    between `terms` and terms² / 2 times, as often as its order needs. NoOrder when no tree of additions explains it.
    """
    check_terms(terms, MAX_TERMS)

    @cache
    def met(i: int, j: int) -> Sequence[int]:
        return terms_met(add(masks(i, j, terms, dtype)), terms, dtype)

    return orders_of(add, met, terms, dtype)


def find_orders_on_ranks(add: Sum, terms: int, dtype: str = "float64", elements: int = 1) -> list[Order]:
    """Return the same of a sum in which several ranks take part: on every rank `add` is called for every pair of terms.

    add: called with arrays of shape (terms, elements).
    """
    check_terms(terms, MAX_PAIRED_TERMS)
    found = {}
    for i in range(terms):
        for j in range(i + 1, terms):
            found[i, j] = terms_met(add(np.repeat(masks(i, j, terms, dtype), elements, axis=1)), terms, dtype)
    return orders_of(add, lambda i, j: found[i, j], terms, dtype, elements)


def check_terms(terms: int, most: int) -> None:
    """Raise UsageError unless the order of this number of terms can be found."""
    if not 1 <= terms <= most:
        raise UsageError(f"--terms {terms}; the order of 1 to {most} terms can be found here")


def masks(i: int, j: int, terms: int, dtype: str) -> np.ndarray:
    """Return the terms, of shape (terms, 1): a large number at i, its negative at j, and one unit everywhere else."""
    values = np.full((terms, 1), np.finfo(dtype).tiny, dtype)
    values[i] = np.ldexp(1.0, np.finfo(dtype).maxexp - 1)  # the largest power of two
    values[j] = -values[i]
    return values


def terms_met(sums: np.ndarray, terms: int, dtype: str) -> list[int]:
    """Return, for each result, how many terms had been added when the two large numbers met."""
    # The unit is the smallest normal number: sums of up to 2,048 units are exact even in float16.
    with np.errstate(over="ignore"):
        units = np.asarray(sums, np.float64) / float(np.finfo(dtype).tiny)
    for count in units:
        if not 0 <= count <= terms - 2 or count != int(count):
            raise NoOrder(
                f"a sum of a large number, its negative and {terms - 2} units is {count:g} units, which no order of"
                f" additions of {dtype} gives; return the sum itself, not a mean, and where partial sums are in a wider"
                " dtype use float32 or float64, or fewer terms"
            )
    return [terms - int(count) for count in units]


def orders_of(
    add: Sum, met: Callable[[int, int], Sequence[int]], terms: int, dtype: str, elements: int = 1
) -> list[Order]:
    """Return the order of each result from the numbers of terms that meet, checked on sums of random numbers."""
    # Random numbers of both signs and of very different size: their sum has other bits in nearly every other order.
    random = np.random.Generator(np.random.PCG64(0))
    trials = [
        np.ldexp(random.standard_normal((terms, 1)), random.integers(-6, 7, (terms, 1))).astype(dtype)
        for _ in range(TRIALS)
    ]
    sums = [add(np.repeat(values, elements, axis=1)) for values in trials]

    # Many elements of an array are added in the same order, which is built and checked once.
    known: dict[Any, Order] = {}
    orders = []
    for k in range(len(sums[0])):
        tree = find_tree(terms, lambda i, j, k=k: met(min(i, j), max(i, j))[k])  # type: ignore[misc]
        right = tuple(float(each[k]) for each in sums)
        if (tree, right) not in known:
            known[tree, right] = Order(terms, tree, accumulator(tree, trials, right, dtype))
        orders.append(known[tree, right])
    return orders


def find_tree(terms: int, met: Met) -> Tree | None:
    """Return the tree of additions in which every two terms meet where `met` says; None when the sum is exact."""
    if terms > 2 and all(met(0, other) == 2 for other in range(1, terms)):
        return None
    return subtree(list(range(terms)), met)


def subtree(members: Sequence[int], met: Met) -> Tree:
    """Return the tree that adds these terms; NoOrder when more than two partial sums are added at once."""
    # The terms other than the first one, by the size of the partial sum in which they meet it.
    first, *others = members
    joined_at: dict[int, list[int]] = {}
    for other in others:
        joined_at.setdefault(met(first, other), []).append(other)

    # From the inside to the outside: what the first term's partial sum is added to is a separate tree.
    tree: Tree = first
    size = 1
    for total, group in sorted(joined_at.items()):
        size += len(group)
        if total != size:
            raise NoOrder(
                f"terms {first} and {group[0]} meet in a partial sum of {total} terms, but {size} terms are known to be"
                " in it; the sum adds more than two numbers at once, or its order changes from call to call"
            )
        tree = tree, subtree(group, met)
    return tree


def accumulator(tree: Tree | None, trials: Sequence[np.ndarray], right: Sequence[float], dtype: str) -> str:
    """Return the dtype in which the additions of a tree give the sums of the trials; NoOrder when none does."""
    if tree is None:
        return "exact"
    for wider in DTYPES[DTYPES.index(dtype) :]:
        sums = [evaluate(tree, values[:, 0].astype(wider)).astype(dtype) for values in trials]
        if all(float(mine) == theirs for mine, theirs in zip(sums, right, strict=True)):
            return wider
    raise NoOrder(
        f"random numbers that are added as {written(tree)} have other bits than the sum; its order depends on the"
        " values, or it does more than add"
    )


def evaluate(tree: Tree, values: np.ndarray) -> Any:
    """Return the sum of the values in the order of the tree."""
    if isinstance(tree, int):
        return values[tree]
    return evaluate(tree[0], values) + evaluate(tree[1], values)


def size_of(tree: Tree) -> int:
    """Return the number of terms of a tree."""
    return 1 if isinstance(tree, int) else size_of(tree[0]) + size_of(tree[1])


def arranged(tree: Tree) -> Tree:
    """Return the tree with its larger partial sums on the left: addition commutes, so its bits are the same."""
    if isinstance(tree, int):
        return tree
    left, right = arranged(tree[0]), arranged(tree[1])
    return (left, right) if (-size_of(left), first_of(left)) <= (-size_of(right), first_of(right)) else (right, left)


def first_of(tree: Tree) -> int:
    """Return the leftmost term of a tree."""
    return tree if isinstance(tree, int) else first_of(tree[0])


def written(tree: Tree) -> str:
    """Return 0 + 1 + 2 for ((0, 1), 2): parentheses stand only around a right-hand side."""

    def sides(part: Tree) -> str:
        if isinstance(part, int):
            return str(part)
        right = sides(part[1])
        return f"{sides(part[0])} + {right if isinstance(part[1], int) else f'({right})'}"

    return sides(arranged(tree))


def chain(order: Sequence[int]) -> Tree:
    """Return the tree of a sum from left to right."""
    return reduce(lambda tree, term: (tree, term), order[1:], order[0])  # type: ignore[arg-type, return-value]


def balanced(terms: Sequence[int]) -> Tree:
    """Return the tree that adds neighbours, then neighbouring pairs, and so on."""
    half = len(terms) // 2
    return (balanced(terms[:half]), balanced(terms[half:])) if half else terms[0]


def strided(terms: Sequence[int]) -> Tree:
    """Return the tree that adds terms half of all apart, then a quarter, and so on."""
    half = len(terms) // 2
    return (strided(terms[::2]), strided(terms[1::2])) if half else terms[0]


def named(tree: Tree, terms: int) -> str:
    """Return the order in words, or ""."""
    if terms < 3:
        return ""
    numbers = list(range(terms))
    orders = {
        "from left to right": chain(numbers),
        **{f"around a ring, from term {start}": chain(numbers[start:] + numbers[:start]) for start in numbers},
        "from right to left": chain(numbers[::-1]),
        "in pairs, neighbours first": balanced(numbers),
        "in pairs, the terms half of all apart first": strided(numbers),
    }
    found = arranged(tree)
    return next((name for name, order in orders.items() if found == arranged(order)), "")
