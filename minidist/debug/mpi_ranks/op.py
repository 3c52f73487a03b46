"""Reduction operations, MPI's and the program's own.

MPI.SUM, PROD, MAX and MIN of numbers are what our collectives reduce with. Of all others the contributions are gathered
and combined in the order of the ranks, which is right for operations that do not commute, too.

Proved by: tests/mpi_ranks/test_collectives.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from minidist.debug.mpi_ranks.buffers import Allocated, Buffer, one
from minidist.debug.mpi_ranks.constants import failed
from minidist.debug.mpi_ranks.handle import Handle, Named


@dataclass
class Operation:
    """What an Op is. of_arrays: (in, inout) -> in (op) inout. of_objects: the same of Python's values.

    ours: the name of the same reduction in `minidist.collectives`. user: a function of two buffers and a datatype.
    """

    name: str
    of_arrays: Callable[[Any, Any], Any] | None = None
    of_objects: Callable[[Any, Any], Any] | None = None
    ours: str = ""
    user: Callable[..., Any] | None = None
    commutes: bool = True


class Op(Handle):
    """A reduction operation, such as MPI.SUM."""

    held: Operation | None
    named = operation = Named[Operation]("ERR_OP", "the operation is OP_NULL; pass one such as MPI.SUM")

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Self:
        """Return the operation of function(in, inout, datatype), which writes in (op) inout into inout."""
        return cls.of(Operation(getattr(function, "__name__", "user"), user=function, commutes=bool(commute)))

    def Free(self) -> None:
        if self.is_predefined:
            raise failed("ERR_OP", f"MPI.{self.predefined or 'OP_NULL'} is predefined and cannot be freed")
        self.held = None

    def Is_commutative(self) -> bool:
        return self.operation.commutes

    is_commutative = property(Is_commutative)
    is_predefined = property(lambda self: self.held is None or self.held.user is None)

    def __reduce__(self) -> Any:
        if self.predefined or self.held is None or self.held.user is None:
            return super().__reduce__()
        return Op.Create, (self.held.user, self.held.commutes)

    def __call__(self, x: Any, y: Any) -> Any:
        if self.held is None:
            raise ValueError("MPI.OP_NULL cannot be called")
        op = self.held
        if op.user is not None:
            return op.user(x, y, None)
        if op.of_objects is None:
            raise failed("ERR_OP", f"MPI.{op.name} is not defined for Python objects; use it with arrays")
        return op.of_objects(x, y)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Replace `inoutbuf` by inbuf (op) inoutbuf."""
        first, second = one(inbuf, False), one(inoutbuf, True)
        if first.count != second.count:
            raise ValueError(f"message: mismatch in inbuf count {first.count} and inoutbuf count {second.count}")
        second.put(self.combine(first.get(), second.get().copy(), second))

    def combine(self, left: np.ndarray, right: np.ndarray, like: Buffer) -> np.ndarray:
        """Return left (op) right, elements of the datatype of `like`; `right` may be written."""
        op = self.operation
        if op.user is not None:
            first, second = (array.view(np.uint8).view(Allocated) for array in (left, right))
            op.user(first, second, like.datatype)
            return right
        if op.name in ("MAXLOC", "MINLOC"):
            return _located(op.name, left, right)
        assert op.of_arrays is not None
        try:
            return np.asarray(op.of_arrays(left, right)).astype(left.dtype, copy=False)
        except TypeError:
            raise failed("ERR_OP", f"{op.name} of {like.datatype.Get_name()}; it needs other elements") from None

    def fold(self, contributions: Sequence[np.ndarray], like: Buffer) -> np.ndarray:
        """Return all contributions combined in the order of the ranks."""
        total = contributions[-1].copy()
        for contribution in reversed(contributions[:-1]):
            total = self.combine(contribution, total, like)
        return total

    def fold_objects(self, values: Sequence[Any]) -> Any:
        """Return all objects combined in the order of the ranks."""
        total = values[0]
        for value in values[1:]:
            total = self(total, value)
        return total


def as_op(op: Any) -> Op:
    """Return an operation: itself, or that of a function of two objects, which lower-case reductions take."""
    if isinstance(op, Op):
        op.operation  # noqa: B018  not OP_NULL
        return op
    return Op.of(Operation(getattr(op, "__name__", "user"), of_objects=op, commutes=False))


def _located(name: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the larger (smaller) value of pairs with its index; of equal values the smaller index."""
    if not left.dtype.names:
        raise failed("ERR_OP", f"{name} of {left.dtype}; it needs pairs such as MPI.DOUBLE_INT")
    a, b = left["value"], right["value"]
    first = (a > b) if name == "MAXLOC" else (a < b)
    takes = first | ((a == b) & (left["index"] < right["index"]))
    return np.where(takes, left, right)


def _located_objects(better: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def choose(x: Any, y: Any) -> Any:
        (a, i), (b, j) = x, y
        return (a, i) if better(a, b) or (not better(b, a) and i <= j) else (b, j)

    return choose


_TABLE: tuple[tuple[str, Any, Any, str], ...] = (
    ("MAX", np.maximum, lambda x, y: y if y > x else x, "max"),
    ("MIN", np.minimum, lambda x, y: y if y < x else x, "min"),
    ("SUM", np.add, lambda x, y: x + y, "sum"),
    ("PROD", np.multiply, lambda x, y: x * y, "prod"),
    ("LAND", np.logical_and, lambda x, y: bool(x) & bool(y), ""),
    ("BAND", np.bitwise_and, lambda x, y: x & y, ""),
    ("LOR", np.logical_or, lambda x, y: bool(x) | bool(y), ""),
    ("BOR", np.bitwise_or, lambda x, y: x | y, ""),
    ("LXOR", np.logical_xor, lambda x, y: bool(x) ^ bool(y), ""),
    ("BXOR", np.bitwise_xor, lambda x, y: x ^ y, ""),
    ("MAXLOC", None, _located_objects(lambda a, b: a > b), ""),
    ("MINLOC", None, _located_objects(lambda a, b: a < b), ""),
    ("REPLACE", lambda x, y: x, lambda x, y: y, ""),
    ("NO_OP", lambda x, y: y, lambda x, y: x, ""),
)
OPS = {name: Op.of(Operation(name, arrays, objects, ours), name) for name, arrays, objects, ours in _TABLE}
OPS["REPLACE"].operation.commutes = OPS["NO_OP"].operation.commutes = False
