"""In which order do ranks add, and does it depend on how many they are?

The terms of a sum are divided among the ranks: consecutive ones on each, the first ranks have one more where they do
not divide. Every rank adds its own from left to right and calls the reduction; a function of a user's own does both.

    12 terms on 3 ranks    rank 0: 0 + 1 + 2 + 3    rank 1: 4 + 5 + 6 + 7    rank 2: 8 + 9 + 10 + 11
    an ordered all-reduce:    0 + 1 + 2 + 3 + (4 + 5 + 6 + 7) + (8 + 9 + 10 + 11)      on 1 rank: 0 + 1 + ... + 11

Proved by: tests/collectives/test_reduction_order.py
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minidist import collectives
from minidist.base.errors import MinidistError, UsageError, nearest, quoted, quoted_path, ranges_text, reason
from minidist.base.extras import extra
from minidist.base.user_file import is_user_function, load_function
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.summation_order import (
    DTYPES,
    MAX_PAIRED_TERMS,
    Order,
    check_terms,
    find_orders,
    find_orders_on_ranks,
)
from minidist.comm.launched import load_mpi
from minidist.comm.launching import execute, under_mpiexec
from minidist.comm.waiting import error_line
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.comm import Comm

OPERATIONS = ("all_reduce", "reduce", "reduce_scatter")
MPI_SUM = "MPI_Allreduce"
WRITTEN = 64  # terms of a sum that is written out for people

LocalSum = Callable[[np.ndarray], Any]  # terms of shape (terms,) -> their sum
Reduction = Callable[[Comm, np.ndarray], Any]  # one rank's terms, of shape (its terms, elements) -> what the rank gets


@dataclass(frozen=True)
class Found:
    """The orders on this number of ranks; of_ranks[r][k]: of the k-th number that rank r gets."""

    ranks: int
    of_ranks: list[list[Order]]

    @property
    def equal(self) -> bool:
        """Whether the orders of all ranks are equal."""
        return all(orders == self.of_ranks[0] for orders in self.of_ranks)

    @property
    def elements(self) -> list[Order]:
        """The orders of the elements of the whole: those of rank 0, or of all ranks where each has a part."""
        return self.of_ranks[0] if self.equal else [order for orders in self.of_ranks for order in orders]

    def groups(self) -> list[tuple[str, Order]]:
        """Return which results are added in which order, the results as a text."""
        together: dict[Order, list[tuple[int, int]]] = {}
        equal = self.equal
        for rank, orders in enumerate(self.of_ranks[:1] if equal else self.of_ranks):
            for k, order in enumerate(orders):
                together.setdefault(order, []).append((rank, k))
        single = equal and len(self.of_ranks[0]) == 1
        return [("" if single else label(places, equal), order) for order, places in together.items()]


@dataclass(frozen=True)
class OrderReport:
    """The orders of one sum, on each number of ranks that was asked for; ranks 0 is a sum without ranks."""

    source: str
    terms: int
    dtype: str
    found: list[Found]

    @property
    def same(self) -> bool:
        """Whether all numbers of ranks add in the same order, each element for itself."""
        return all(each.elements == self.found[0].elements for each in self.found)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints; `tree` is made of nested pairs of the numbers of terms."""
        runs = [
            {
                "ranks": each.ranks,
                "orders": [
                    [{"tree": order.tree, "name": order.name, "accumulator": order.accumulator} for order in orders]
                    for orders in each.of_ranks
                ],
            }
            for each in self.found
        ]
        return {"source": self.source, "terms": self.terms, "dtype": self.dtype, "same": self.same, "runs": runs}

    def lines(self) -> list[str]:
        """Return the report for people."""
        result = []
        for each in self.found:
            where = f" on {each.ranks} rank{'s' * (each.ranks != 1)}" if each.ranks else ""
            result.append(f"{self.source} adds {self.terms} terms of {self.dtype}{where}:")
            for places, order in each.groups():
                name = f"   {order.name}" if order.name else ""
                wide = f"   partial sums in {order.accumulator}" * (order.accumulator not in (self.dtype, "exact"))
                text = str(order) if self.terms <= WRITTEN or order.tree is None else "(--json has the whole tree)"
                result.append(f"  {places}{': ' if places else ''}{text}{name}{wide}")
        if len(self.found) > 1:
            result.append(self.verdict())
        return result

    def verdict(self) -> str:
        """Return in a sentence whether the bits depend on the number of ranks."""
        if self.same:
            return "The order does not depend on the number of ranks, so the bits do not either."
        first = self.found[0]
        other = next(each for each in self.found if each.elements != first.elements)
        return (
            f"The order depends on the number of ranks: {first.ranks} and {other.ranks} add in different orders, so"
            " their results can have different bits."
        )


def label(places: Sequence[tuple[int, int]], equal: bool) -> str:
    """Return "elements 0-3, 8" for results (rank, element), with the rank unless all ranks' orders are `equal`."""
    texts = []
    for rank in dict.fromkeys(rank for rank, _ in places):
        elements = [k for owner, k in places if owner == rank]
        owner = "" if equal else f"rank {rank}, "
        texts.append(f"{owner}element{'s' * (len(elements) > 1)} {ranges_text(elements)}")
    return "; ".join(texts)


def refuse_ranks(source: str, ranks: Sequence[int] | None, elements: int | None) -> None:
    """Raise UsageError for what a sum without ranks has no use for."""
    given = {"mpiexec": under_mpiexec(), "--ranks": ranks is not None, "--elements": elements is not None}
    for what in (what for what, is_given in given.items() if is_given):
        raise UsageError(f"{what}: {source} is a sum without ranks; leave it out, or give a function(comm, array)")


def numbers_of_ranks(
    source: str, terms: int | None, ranks: Sequence[int] | None, elements: int | None
) -> Sequence[int | None]:
    """Return on how many ranks a sum over ranks runs, one number after the other; None: as many as mpiexec started."""
    if under_mpiexec() and ranks is not None:
        raise UsageError("--ranks under mpiexec; leave it out, mpiexec decides how many ranks add")
    if source == MPI_SUM and not under_mpiexec():
        raise UsageError(f"{MPI_SUM} needs real ranks: mpiexec -n 4 minidist order {MPI_SUM}")
    if is_user_function(source) and elements is not None:
        raise UsageError(f"--elements: {source} gets an array of terms; leave it out")
    if under_mpiexec():
        return [None]
    numbers = list(ranks or [4])
    for number in numbers:
        if number:
            check_divided(terms, number)
    return numbers


def find_reduction_orders(
    source: str,
    terms: int | None = None,
    ranks: Sequence[int] | None = None,
    dtype: str = "float64",
    operation: str = "all_reduce",
    elements: int | None = None,
) -> OrderReport | None:
    """Find in which order `source` adds; None on the ranks of an MPI job that do not report.

    source: an algorithm of `operation`; FILE.py:FUNCTION with `function(array)` or, for a sum over ranks,
    `function(comm, array)`, which gets its rank's terms; a key of `local_sums`; MPI_Allreduce, under mpiexec.
    terms: of the sum; default 8, or one per rank. elements: of the arrays that an algorithm reduces; default one per
    rank, so that every chunk is seen. UsageError for what cannot be, and NoOrder for a sum that has no order.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {quoted(dtype)}; it must be one of {', '.join(DTYPES)}")
    if operation not in OPERATIONS:
        raise UsageError(f"--operation {quoted(operation)}; it must be one of {', '.join(OPERATIONS)}")

    # A sum without ranks.
    local, reduction = resolve(source, operation)
    if local is not None:
        refuse_ranks(source, ranks, elements)
        count = 8 if terms is None else terms
        return OrderReport(source, count, dtype, [Found(0, [find_orders(local, count, dtype)])])

    # A sum over ranks, on each number of ranks that is asked for.
    assert reduction is not None
    numbers = numbers_of_ranks(source, terms, ranks, elements)
    found = []
    for number in numbers:
        outcome = execute(on_rank, reduction, terms, dtype, 1 if is_user_function(source) else elements, ranks=number)
        if not outcome.is_root:
            return None
        found.append(Found(outcome.size, outcome.results))
    return OrderReport(source, found[0].of_ranks[0][0].terms, dtype, found)


def check_divided(terms: int | None, ranks: int) -> None:
    """Raise UsageError unless every rank has a term, and their order can be found."""
    if terms is not None and terms < ranks:
        raise UsageError(f"--terms {terms} on {ranks} ranks; every rank needs at least one term")
    check_terms(ranks if terms is None else terms, MAX_PAIRED_TERMS)


def on_rank(comm: Comm, reduction: Reduction, terms: int | None, dtype: str, elements: int | None) -> list[Order]:
    """Return the orders of what this rank gets; every rank calls `reduction` terms (terms - 1) / 2 + 4 times."""
    check_divided(terms, comm.size)
    count = comm.size if terms is None else terms
    ends = offsets(chunk_sizes(count, comm.size))
    mine = slice(ends[comm.rank], ends[comm.rank + 1])

    def add(values: np.ndarray) -> np.ndarray:
        result = reduction(comm, values[mine].copy())
        return np.empty(0) if result is None else numbers_of(result)

    return find_orders_on_ranks(add, count, dtype, comm.size if elements is None else elements)


def resolve(source: str, operation: str) -> tuple[Callable[[np.ndarray], np.ndarray] | None, Reduction | None]:
    """Return the sum that `source` names: one without ranks, or one over ranks; the other is None."""
    if source == MPI_SUM:
        return None, mpi_all_reduce
    if source in ALGORITHMS[operation]:
        return None, partial(by_algorithm, operation, source)
    if not is_user_function(source):
        sums = local_sums()
        if source not in sums:
            names = [*ALGORITHMS[operation], *sums, MPI_SUM]
            raise UsageError(
                f"{quoted_path(source)} is not a known sum{nearest(source, names)}; write FILE.py:FUNCTION, an"
                " algorithm"
                f" of {operation} ({', '.join(ALGORITHMS[operation])}), or one of {', '.join([*sums, MPI_SUM])}"
            )
        return (lambda values: numbers_of(sums[source](values[:, 0].copy()))), None

    # A user's own function says by the number of its arguments whether it takes part in a world.
    function = load_function(source)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds and p.default is p.empty]
    if len(required) not in (1, 2):
        raise UsageError(f"{source} has {len(required)} arguments; write function(array), or function(comm, array)")

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except MinidistError:
            raise
        except Exception as error:
            raise UsageError(f"{source} raised {error_line(error)}") from None

    if len(required) == 1:
        return (lambda values: numbers_of(call(values[:, 0].copy()))), None
    return None, lambda comm, values: call(comm, values[:, 0].copy())


def numbers_of(result: Any) -> np.ndarray:
    """Return what a sum has returned as an array of shape (results,); UsageError unless it is made of numbers."""
    try:
        return np.asarray(result, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the sum returned {quoted(result)}: {reason(error)}; return a number or an array") from None


def left_to_right(values: np.ndarray) -> np.ndarray:
    """Return the sum over the first axis, one row after the other."""
    total: np.ndarray = values[0].copy()
    for row in values[1:]:
        total += row
    return total


def by_algorithm(operation: str, name: str, comm: Comm, values: np.ndarray) -> Any:
    """Add a rank's own terms from left to right, and all ranks' by an algorithm of minidist."""
    return getattr(collectives, operation)(comm, left_to_right(values), algorithm=name)


def mpi_all_reduce(comm: Comm, values: np.ndarray) -> np.ndarray:
    """Add a rank's own terms from left to right, and all ranks' by the MPI library."""
    MPI = load_mpi()
    total = left_to_right(values)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total)
    return total


def local_sums() -> dict[str, LocalSum]:
    """Return the sums of other libraries by name."""

    def torch_sum(values: np.ndarray) -> Any:
        return extra("torch", "torch.sum").from_numpy(values).sum().item()

    return {
        "numpy.sum": np.sum,
        "numpy.dot": lambda values: np.dot(values, np.ones_like(values)),
        "sum": sum,
        "math.fsum": math.fsum,
        "torch.sum": torch_sum,
    }
