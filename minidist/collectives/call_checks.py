"""What can be wrong with a collective call on one rank alone, refused with the remedy before a message is sent.

Proved by: tests/collectives/test_collectives.py, tests/misuse/test_misuse.py
"""

from functools import cache
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError, quoted
from minidist.core.base.layout import MASKED, is_masked, may_overlap
from minidist.core.collectives.operations import UFUNCS
from minidist.core.comm.mesh import check_communicator
from minidist.core.comm.point_to_point import PointToPoint


def check_call(comm: PointToPoint, operation: str, array: Any, op: str | None = None, out: Any = None) -> None:
    """Refuse what is not a communicator or a contiguous array, what `op` cannot reduce, and an `out` that is in use."""
    if not isinstance(comm, PointToPoint):
        check_communicator(comm, operation)
    if not hasattr(array, "flags") or isinstance(array, np.generic):
        raise UsageError(
            f"rank {comm.rank}: {operation} of a {type(array).__name__}; collectives work on arrays: pass"
            " numpy.array(...)"
        )
    if array.__class__ is not np.ndarray and is_masked(array):
        raise UsageError(f"rank {comm.rank}: {operation} of {MASKED}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"rank {comm.rank}: {operation} of an array with strides {array.strides}; pass a C-contiguous array"
        )
    if op is not None:
        if not isinstance(op, str):  # as in MPI's order of arguments: what is sent, where the result goes
            raise UsageError(
                f"rank {comm.rank}: {operation} with op {quoted(op)}; op is a name, such as 'sum', and operations that"
                " take an array for the result have out="
            )
        check_op(op, array.dtype)
    if operation == "all_reduce" and not getattr(array.flags, "writeable", True):
        raise UsageError(
            f"rank {comm.rank}: all_reduce of an array that is read-only, where the sum would go; pass a copy"
        )
    if out is not None:
        _check_out(comm, operation, array, out)


def _check_out(comm: PointToPoint, operation: str, array: Any, out: Any) -> None:
    """Refuse an array for the result that cannot be written, or that other ranks still read."""
    if not getattr(out.flags, "writeable", True):
        raise UsageError(f"rank {comm.rank}: {operation} into an out that is read-only; pass one that may be written")
    its_own = {"reduce_scatter": "input", "scatter": "array"}.get(operation)
    if its_own and out is not array and may_overlap(out, array):
        raise UsageError(
            f"rank {comm.rank}: {operation} into its own {its_own}, which other ranks still need; pass an out elsewhere"
        )


@cache
def check_op(op: str, dtype: np.dtype[Any]) -> None:
    """Raise a UsageError unless two values of `dtype` can be reduced by `op`."""
    if op not in UFUNCS:
        raise UsageError(f"unknown reduction {quoted(op)}; one of {', '.join(UFUNCS)}")
    try:  # dates and records cannot; text can, since NumPy 2, but its sum is not a number
        if dtype.kind in "SUT":
            raise TypeError
        nothing = np.empty(0, dtype)

        # An empty array is enough for NumPy to say whether it has this operation for this dtype.
        UFUNCS[op](nothing, nothing, out=nothing)
    except TypeError:
        raise UsageError(f"{dtype} values have no {quoted(op)}; reduce numbers, or send this array as bytes") from None
    if op in ("max", "min") and dtype.kind == "c":
        raise UsageError(
            f"{dtype} values have no {quoted(op)}, because complex numbers have no order; reduce their absolute values"
        )
    if op == "avg" and dtype.kind in "iub":
        raise UsageError(
            f"the average of {dtype} values is not an integer; reduce with 'sum', or convert to a float dtype"
        )
