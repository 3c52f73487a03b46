"""The operators and methods of a tensor: `a + b`, `x.sum()`, `loss.backward()`.

The operations need `Tensor`, and a tensor's methods are these operations. So that no module imports one that imports
it, the methods are set here, above both; the package imports this module last.

Proved by: tests/autograd/test_operations.py
"""

from typing import Any

from minidist.core.autograd.backward import backward
from minidist.core.autograd.ops.elementwise import add, cast, div, exp, log, mul, neg, pow, relu, sqrt, sub, tanh
from minidist.core.autograd.ops.linear import matmul
from minidist.core.autograd.ops.reductions import max, mean, sum
from minidist.core.autograd.ops.shaping import getitem, reshape, transpose
from minidist.core.autograd.tensor import Tensor


def _reshape(x: Tensor, *shape: Any) -> Tensor:
    """The elements in row-major order under another shape, given as a tuple or as numbers; one entry may be -1."""
    return reshape(x, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def _transpose(x: Tensor, *axes: int) -> Tensor:
    """The dims permuted as `axes` says (reversed when none are given)."""
    return transpose(x, axes or None)


Tensor.__add__ = Tensor.__radd__ = add
Tensor.__sub__ = sub
Tensor.__rsub__ = lambda x, other: sub(other, x)
Tensor.__mul__ = Tensor.__rmul__ = mul
Tensor.__truediv__ = div
Tensor.__rtruediv__ = lambda x, other: div(other, x)
Tensor.__pow__ = pow
Tensor.__neg__ = neg
Tensor.__matmul__ = matmul
Tensor.__rmatmul__ = lambda x, other: matmul(other, x)
Tensor.__getitem__ = getitem
Tensor.backward = backward
Tensor.astype = cast
Tensor.sum, Tensor.mean, Tensor.max = sum, mean, max
Tensor.reshape, Tensor.transpose = _reshape, _transpose
Tensor.T = property(transpose, doc="The dims reversed.")
Tensor.exp, Tensor.log, Tensor.sqrt, Tensor.tanh, Tensor.relu = exp, log, sqrt, tanh, relu
