"""What can be wrong with a collective call on one rank alone, refused with the remedy before a message is sent.

Proved by: tests/collectives/test_collectives.py, tests/misuse/test_misuse.py
"""

from ctypes import addressof, c_char
from functools import cache
from operator import index
from typing import Any, SupportsIndex
from zlib import crc32

import numpy as np

from minidist.base.errors import MAX_QUOTED, UsageError, check_divisible, quoted
from minidist.comm.message_checks import may_overlap
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import add_into, is_half
from minidist.core.base.layout import chunk_sizes
from minidist.core.collectives.calls import UFUNCS
from minidist.core.comm.communicator import PointToPoint
from minidist.core.comm.mesh import check_communicator

SHAPED = ("all_reduce", "reduce_scatter", "reduce", "broadcast")  # every rank passes the same shape; three reduce


def check_call(
    comm: PointToPoint,
    operation: str,
    array: Any,
    op: str | None = None,
    equal: str = "",
    out: Any = None,
    root: Any = 0,
    counts: Any = None,
) -> str:
    """Refuse what is not a communicator or a contiguous array, what `op` cannot reduce, an `out` that is in use or does
    not fit, a root that is not a rank, and counts that are not those of the array.

    counts: of an all_to_all (send_counts, receive_counts). Returns `equal` with what else must be equal on every rank.
    """
    if not isinstance(comm, PointToPoint):
        check_communicator(comm, operation)
    # A plain all_reduce needs few checks. A short message takes only a few times as long as these.
    if operation == "all_reduce" and array.__class__ is np.ndarray and array.flags.carray and op.__class__ is str:
        check_op(op, array.dtype)
        return equal if array.ndim == 1 else _with_shape(operation, array, counts, equal)
    if array.__class__ is not np.ndarray or not array.flags.c_contiguous:
        _check_array(comm, operation, array)
    if op is not None or operation in SHAPED[:3]:
        _check_reduction(comm, operation, array, op)
    if root.__class__ is not int or not 0 <= root < comm.size:
        _check_root(comm, operation, root)
    if operation == "all_to_all":
        _check_exchange(comm, array.size, *counts)
    elif counts is not None:
        _check_counts(comm, operation, array.size, counts)
    if out is not None:
        _check_out(comm, operation, array, out, counts)
    return _with_shape(operation, array, counts, equal) if operation in SHAPED else equal


def _with_shape(operation: str, array: Any, counts: Any, equal: str) -> str:
    """Return `equal` with the counts, which some algorithms do not send, and the shape: (2, 3) would meet (3, 2)."""
    if operation == "reduce_scatter" and counts is not None:
        equal = f"{equal} {_counts_text(list(map(int, counts)))}".strip()
    return equal if array.ndim == 1 else f"{equal} {list(array.shape)}".lstrip()


def _counts_text(sizes: list[int]) -> str:
    """Return the counts, which must be equal on both sides of each message; "" for those that need not be passed."""
    if sizes == chunk_sizes(sum(sizes), len(sizes)):
        return ""
    text = str(sizes)
    return f"counts {text}" if len(text) <= MAX_QUOTED else f"counts #{crc32(text.encode()):x}"


def _check_array(comm: PointToPoint, operation: str, array: Any) -> None:
    """Refuse what is not an array, and an array whose elements are masked or do not lie one after the other."""
    if not hasattr(array, "flags") or isinstance(array, np.generic):
        raise UsageError(
            f"rank {comm.rank}: {operation} of a value of type {type(array).__name__}; collectives work on arrays:"
            " pass numpy.array(...)"
        )
    if hasattr(array, "mask"):
        from minidist.comm.message_refusals import MASKED

        raise UsageError(f"rank {comm.rank}: {operation} of {MASKED}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"rank {comm.rank}: {operation} of an array with strides {array.strides}; pass a C-contiguous array"
        )


def _check_reduction(comm: PointToPoint, operation: str, array: Any, op: Any) -> None:
    """Refuse an `op` that is not a name or not for this dtype, and a read-only array that would get the sum."""
    if not isinstance(op, str):
        raise UsageError(
            f"rank {comm.rank}: {operation} with op {quoted(op)}; op is a name, such as 'sum', and operations that"
            " take an array for the result have out="
        )
    check_op(op, array.dtype)
    if operation == "all_reduce" and not getattr(array.flags, "writeable", True):
        raise UsageError(
            f"rank {comm.rank}: all_reduce of an array that is read-only, where the sum would go; pass a copy"
        )


def _check_out(comm: PointToPoint, operation: str, array: Any, out: Any, counts: Any) -> None:
    """Refuse an `out` that is not an array, is read-only or in use by other ranks, or has another size or dtype."""
    if not hasattr(out, "flags"):
        raise UsageError(
            f"rank {comm.rank}: {operation} into a value of type {type(out).__name__}; pass an array for the result"
            " as out, or none"
        )
    if not getattr(out.flags, "writeable", True):
        raise UsageError(f"rank {comm.rank}: {operation} into an out that is read-only; pass one that may be written")
    its_own = {"reduce_scatter": "input", "scatter": "array"}.get(operation)
    if its_own and out is not array and may_overlap(out, array):
        raise UsageError(
            f"rank {comm.rank}: {operation} into its own {its_own}, which other ranks still need; pass an out elsewhere"
        )
    if operation == "all_gather":
        size = sum(counts) if counts is not None else array.size * comm.size
    else:
        size = (chunk_sizes(array.size, comm.size) if counts is None else counts)[comm.rank]
    if out.size != size or out.dtype != array.dtype or not out.flags.c_contiguous:
        raise UsageError(
            f"rank {comm.rank}: {operation} needs a C-contiguous out of {size} elements of {array.dtype}, "
            f"got {out.size} of {out.dtype}" + ("" if out.flags.c_contiguous else f" with strides {out.strides}")
        )


def _check_root(comm: PointToPoint, operation: str, root: Any) -> None:
    """Refuse a root that is not a rank."""
    if not isinstance(root, SupportsIndex) or not 0 <= index(root) < comm.size:
        raise UsageError(f"rank {comm.rank}: {operation} with root {quoted(root)}; ranks are 0..{comm.size - 1}")


def _integers(comm: PointToPoint, operation: str, counts: Any) -> list[int]:
    """Return the counts as Python integers; 2.5 is refused, not rounded."""
    try:
        return [index(count) for count in counts]
    except TypeError:
        text = list(counts) if hasattr(counts, "__iter__") else quoted(counts)
        raise UsageError(
            f"rank {comm.rank}: {operation} with counts {text}; a count is a whole number of elements, and every rank"
            " has one"
        ) from None


def _check_counts(comm: PointToPoint, operation: str, size: int, counts: Any) -> None:
    """Refuse counts that are not those of the ranks. size: of this rank's array."""
    sizes = _integers(comm, operation, counts)
    if operation in ("all_gather", "gather"):
        if len(sizes) != comm.size or sizes[comm.rank] != size or min(sizes) < 0:
            raise UsageError(
                f"rank {comm.rank}: {operation} of {size} elements with counts {sizes}; it needs {comm.size} counts,"
                f" and that of rank {comm.rank} must be {size}: every rank passes as many elements as its count says"
            )
    elif len(sizes) != comm.size or sum(sizes) != size or min(sizes) < 0:
        raise UsageError(
            f"rank {comm.rank}: {operation} of {size} elements with counts {sizes}; "
            f"it needs {comm.size} counts of at least 0 that sum to {size}"
        )


def _check_exchange(comm: PointToPoint, size: int, send_counts: Any, receive_counts: Any) -> None:
    """Refuse counts of an all_to_all that are not those of its chunks."""
    if (send_counts is None) != (receive_counts is None):
        raise UsageError(f"rank {comm.rank}: all_to_all needs both send_counts and receive_counts, or none")
    if send_counts is None:
        check_divisible(size, "elements of an all_to_all", comm.size, or_else="pass counts")
        return
    _check_counts(comm, "all_to_all", size, send_counts)
    own, receives = index(send_counts[comm.rank]), _integers(comm, "all_to_all", receive_counts)
    if len(receives) != comm.size or min(receives) < 0 or receives[comm.rank] != own:
        raise UsageError(
            f"rank {comm.rank}: all_to_all with receive_counts {receives}; it needs {comm.size} counts of at least 0, "
            f"its own equal to what it sends itself, {own}"
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


# --- sums in another way: 16-bit floats are rounded, short integers are checked, and some arrays are cut in two ---


def special_sum(op: str, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> bool:
    """Store first (op) second in `out` where plain arithmetic would be wrong or slow; return whether that is so.

    In half precision each addition is done in float32 and rounded, so the sum of n contributions is rounded n - 1
    times, at every rank that adds (as in NCCL). To round only once, reduce in float32:
    `MixedPrecisionPolicy(reduce_dtype=float32)`, twice the bytes.
    """
    # Another core that has read `out`, as a message, has its lines in its cache. A vector store across two lines
    # invalidates both there, and so each line twice: stores of whole lines take half the time.
    if out.dtype.char in "fd":
        head = elements_before_line(out)
        if head:
            UFUNCS[op](first[:head], second[:head], out=out[:head])
            UFUNCS[op](first[head:], second[head:], out=out[head:])
        return head > 0

    # Half precision: upcast, add in float32, downcast, in pieces that stay in the cache where `out` is the first one.
    if op in ("sum", "avg") and isinstance(out, np.ndarray) and is_half(out.dtype):
        if out is first:
            add_into(out, second)
        else:
            # A sum that is too large becomes infinite, and a loss scaler looks for it.
            with np.errstate(over="ignore", invalid="ignore"):
                xp.add(first, second, out=out)
        return True
    if out.itemsize <= 4 and op in ("sum", "prod") and out.dtype.kind in "iu":
        _checked(op, first, second, out)
        return True
    return False


LINE = 64  # bytes of a cache line


def elements_before_line(value: np.ndarray) -> int:
    """Return how many elements of a 1-D array lie before its first whole cache line; 0 for any other array."""
    if value.ndim != 1 or type(value) is not np.ndarray or not value.flags.carray:
        return 0
    # This takes a third of the time of `value.ctypes.data`.
    return -addressof(c_char.from_buffer(value.data)) % LINE // value.itemsize


def _checked(op: str, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Store first (op) second of integers of less than 64 bits in `out`; UsageError where the result is too large.

    NumPy keeps the lower bits, so that the int8 100 + 100 would be -56. A sum of 64 bits is not checked.
    """
    if xp.is_meta(out):
        UFUNCS[op](first, second, out=out)
        return
    wide = UFUNCS[op](first.astype(xp.int64), second.astype(xp.int64))
    range_of = np.iinfo(out.dtype)
    right = (wide >= range_of.min) & (wide <= range_of.max)
    if not right.all():
        value = int(wide.reshape(-1)[int((~right).reshape(-1).argmax())])
        raise UsageError(
            f"{quoted(op)} of {out.dtype} values gives {value}, and {out.dtype} ends at"
            f" {range_of.max if value > 0 else range_of.min}; reduce in int64: array.astype(numpy.int64)"
        )
    out[...] = wide
