"""Methods of a tensor that the core does without, under their names without underscores.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_refusals.py
"""

import builtins
from collections.abc import Iterator
from typing import Any

from minidist.base.errors import AutogradError, reason
from minidist.core.autograd.operators import div, mismatch, reshape
from minidist.core.autograd.ops.linear import matmul
from minidist.core.autograd.parameter import Parameter
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.layout import Layout
from minidist.nn.ops.functions import astype as astype
from minidist.nn.ops.functions import exp as exp
from minidist.nn.ops.functions import log as log
from minidist.nn.ops.functions import max as max
from minidist.nn.ops.functions import neg as neg
from minidist.nn.ops.functions import pow as pow
from minidist.nn.ops.functions import relu as relu
from minidist.nn.ops.functions import sqrt as sqrt
from minidist.nn.ops.functions import sub as sub
from minidist.nn.ops.functions import tanh as tanh


def rsub(x: Tensor, other: Any) -> Tensor:
    """other - x."""
    return sub(other, x)


def rtruediv(x: Tensor, other: Any) -> Tensor:
    """other / x."""
    return div(other, x)


def transpose(x: Tensor, *axes: int) -> Tensor:
    """The dims permuted as `axes` says (reversed when none are given)."""
    from minidist.nn.ops import shaping

    return shaping.transpose(x, axes or None)


def detach(x: Tensor) -> Tensor:
    """The same array without the node: gradients stop here."""
    return Tensor(x.data)


def bool(x: Tensor) -> Any:
    """The truth value of one element; AutogradError for more."""
    if x.size != 1:
        raise AutogradError(
            f"the truth value of a Tensor of shape {x.shape} is asked for, which has {x.size} elements; ask"
            " for that of (x.data > 0).all(), or of x is not None"
        )
    return builtins.bool(x.data.reshape(-1)[0])


def iter(x: Tensor) -> Iterator[Tensor]:
    """The rows."""
    return (x[row] for row in range(len(x)))


def array(x: Tensor, *_: Any, **__: Any) -> Any:
    """Raise AutogradError."""
    raise AutogradError(
        f"an array of a Tensor of shape {x.shape} was asked for, and no gradient gets through an array; take its"
        " values, x.data, or combine Tensors with stack()"
    )


def array_function(x: Tensor, function: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Return what a NumPy function makes of a Tensor, such as np.shape; AutogradError for one that cannot take it."""
    try:
        return function._implementation(*arguments, **keywords)
    except TypeError as error:
        name = function.__name__
        own = f"x.{name}() keeps its gradient, and " * hasattr(Tensor, name)
        raise AutogradError(f"np.{name} takes no Tensor ({reason(error)}); {own}x.data is its array") from None


def product_with_vector(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b where one of them is a vector: a row on the left, a column on the right."""
    if a.ndim == 0 or b.ndim == 0:
        raise mismatch("matmul", a, b, "include a scalar; use * instead")
    if a.shape[-1] != b.shape[0 if b.ndim == 1 else -2]:
        raise mismatch("matmul", a, b, "do not fit: columns of the first must be rows of the second")
    left = reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    result = matmul(left, right)
    if b.ndim == 1:
        result = reshape(result, result.shape[:-1])
    if a.ndim == 1:
        result = reshape(result, result.shape[:-1] if b.ndim == 1 else (*result.shape[:-2], result.shape[-1]))
    return result


def reduce_ex(x: Tensor, protocol: Any) -> Any:
    """What `copy` and `pickle` keep: of a parameter the values and the name, and no gradient, hook or owner."""
    if isinstance(x, Parameter):
        if x._data is None:
            raise AutogradError(
                f"parameter {x.name!r} of a sharded module cannot be copied or pickled, because each rank has a part"
                " of it; copy the model before fully_shard, or load"
                " gather_tensors(shards_of(model), optimizer)['weights'] into another one"
            )
        return _copied, (x.data, x.requires_grad, x.name, x.init, x.layout)
    # The graph is functions and other nodes' arrays; a copy of it would share them with the original.
    if x.node is not None and x.node.name != "leaf":
        raise AutogradError(
            f"a tensor of shape {x.shape} that {x.node.name!r} computed cannot be copied or pickled: it is"
            " part of a graph; copy x.detach()"
        )
    return Tensor, (x.data, x.requires_grad)


def _copied(
    data: xp.Array, requires_grad: builtins.bool, name: str, init: tuple[str, float] | None, layout: Layout | None
) -> Parameter:
    """Return the parameter that copy.deepcopy and pickle make."""
    parameter = Parameter(data, requires_grad, name, init)
    parameter.layout = layout
    return parameter
