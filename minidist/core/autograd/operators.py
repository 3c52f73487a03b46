"""The operators and methods of a tensor: `a + b`, `x.sum()`, `loss.backward()`.

The operations need `Tensor`, and a tensor's methods are these operations. To avoid a circular
import, the methods are set here; the package imports this module last.

Proved by: tests/autograd/test_operations.py
"""

from collections.abc import Callable
from typing import Any

from minidist.core.autograd.backward import backward
from minidist.core.autograd.ops.elementwise import add, cast, div, mul, neg, pow, sub
from minidist.core.autograd.ops.linear import matmul
from minidist.core.autograd.ops.reductions import mean, sum
from minidist.core.autograd.ops.shaping import getitem, reshape
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import hooks


def _reshape(x: Tensor, *shape: Any) -> Tensor:
    """The elements in row-major order under another shape, given as a tuple or as numbers; one entry may be -1."""
    return reshape(x, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def _added(name: str) -> Callable[..., Any]:
    """Return the method of this name that a library adds."""
    return lambda *arguments, **keywords: getattr(hooks.tensor_methods(), name)(*arguments, **keywords)


Tensor.__add__ = Tensor.__radd__ = add
Tensor.__sub__ = sub
Tensor.__rsub__ = lambda x, other: sub(other, x)
Tensor.__mul__ = Tensor.__rmul__ = mul
Tensor.__truediv__ = div
Tensor.__rtruediv__ = lambda x, other: div(other, x)
Tensor.__neg__ = neg
Tensor.__pow__ = pow
Tensor.__matmul__ = matmul
Tensor.__rmatmul__ = lambda x, other: matmul(other, x)
Tensor.__getitem__ = getitem
Tensor.backward = backward
Tensor.astype = cast
Tensor.sum, Tensor.mean, Tensor.reshape = sum, mean, _reshape

# No model of the core uses these: a library adds them.
for name in ("exp", "log", "max", "relu", "sqrt", "tanh", "transpose", "detach"):
    setattr(Tensor, name, _added(name))
for name in ("bool", "iter", "array", "reduce_ex"):
    setattr(Tensor, f"__{name}__", _added(name))
Tensor.T = property(_added("transpose"), doc="The dims reversed.")
