"""Notice updates of the parameters that a node keeps for backward, and writes into its arrays.

A version counts the updates of a parameter, and backward refuses a version other than forward's. A write into the array
itself (`p.data[...] *= 3`, the next batch in a reused buffer) counts nothing: NumPy does not say that an array was
written to, and comparing all values would read every weight twice more in each step. So about a hundred values, spread
over rows and columns, are kept and compared: what an optimizer, a clipping, a re-initialisation or another batch writes
changes some of them. It costs about a microsecond. A write to a few elements may be missed;
`detect_in_place_changes()` compares all, for debugging.

Proved by: tests/autograd/test_in_place.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from math import gcd, prod
from typing import Any

from minidist.core.autograd.tensor import grad_enabled
from minidist.core.base import arrays as xp
from minidist.core.base.errors import VersionError

SAMPLED = 61  # elements that are compared, at least, of an array that has as many
_whole: ContextVar[bool] = ContextVar("minidist_compare_whole_arrays", default=False)


@cache
def sample_step(shape: tuple[int, ...]) -> int:
    """The distance of two sampled values: without a common divisor with the row length, so that columns differ."""
    step = max(1, prod(shape) // SAMPLED)
    while step > 1 and gcd(step, shape[-1]) != 1:
        step -= 1
    return step


@contextmanager
def detect_in_place_changes() -> Iterator[None]:
    """Compare all values, not a sample, of what forwards in the block keep for backward: finds every write to them."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


class SampledTensor:
    """One use of a parameter or an input by a node: reads the array bound at the time of the backward, if it fits.

    version: the one that forward used. array: the values, of which a sample is kept; None while they are released.
    """

    __slots__ = ("step", "tensor", "values", "version")

    def __init__(self, tensor: Any, version: int, array: xp.Array | None) -> None:
        self.tensor, self.version, self.step, self.values = tensor, version, 0, b""
        # Of an array on a device nothing is compared: the copy would wait for it. Without a graph nothing is read.
        if type(array) is xp.ndarray and grad_enabled.get():
            self.step = 1 if _whole.get() else sample_step(array.shape)
            self.values = array.ravel()[:: self.step].tobytes()

    @property
    def data(self) -> xp.Array:
        """The array; VersionError when its version or its values are not those that forward saw."""
        tensor = self.tensor
        if tensor.version != self.version:
            raise VersionError(
                f"parameter {tensor.name!r} was changed between forward and backward: it has version {tensor.version},"
                f" and forward used version {self.version}; call backward before optimizer.step() and before any other"
                " change of its values"
            )
        data: xp.Array = tensor.data

        # The owner of a stash says which version it binds; the values that it binds under that number are its business.
        compares = self.step and (tensor.flat is None or not tensor.flat.version_is_given)
        if compares and data.ravel()[:: self.step].tobytes() != self.values:
            what = f"parameter {tensor.name!r}" if tensor.name else f"an input of shape {data.shape}"
            raise VersionError(
                f"{what} was written to between forward and backward, so gradients would be wrong; call backward before"
                " its values change, or give forward a copy"
            )
        return data
