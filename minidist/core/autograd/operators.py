"""The operators of a tensor, `a + b`, its methods, `x.sum()`, and what they make of their operands.

Scalars become arrays of the tensor's dtype, dtypes must agree, two operands broadcast as in NumPy, and the gradient of
a broadcast operand is summed back to the operand's shape. A vector-Jacobian product (vjp) keeps only what it needs, the
operand or the result. It keeps an operand through `saved()`, so that a Parameter's array is read again.

A tensor's methods are operations, which need `Tensor`: they are set here, and in ops/linear.py and backward.py.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_refusals.py, tests/autograd/test_half.py
"""

import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import ShapeError


def as_tensor(value: Any, like: Tensor) -> Tensor:
    """`value` as a tensor. Any Python or NumPy scalar takes the dtype of `like`; so do arrays of integers or bools."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, float)) or not isinstance(like, Tensor) or like.dtype.kind in "biu":
        hooks.wrong_arguments().check_operand(value, like)
        if xp.is_array(value) and value.ndim > 0 and value.dtype.kind not in "biu":
            return Tensor(value)
    return Tensor(xp.as_array(value, like.dtype))


def pair(name: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both operands as tensors of one dtype: float32 and half precision meet as `precision.RULES` says."""
    if not isinstance(a, Tensor):
        a = as_tensor(a, b)
    elif not isinstance(b, Tensor):
        b = as_tensor(b, a)
    if a.dtype != b.dtype:
        return hooks.precision().of_one_dtype(name, a, b)
    return a, b


def operands(name: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """The `pair`, as an operation sees it that computes in float32 (`operand`)."""
    a, b = pair(name, a, b)
    return operand(a), operand(b)


def operand(x: Tensor) -> Tensor:
    """x as an operation sees it that computes in float32: x itself, or a `HalfOperand` when it is half precision."""
    if not isinstance(x, Tensor):
        hooks.wrong_arguments().refuse_operand(x)
    dtype = x.dtype
    return hooks.precision().HalfOperand(x) if dtype.itemsize == 2 and xp.is_half(dtype) else x


def mismatch(name: str, a: Any, b: Any, reason: str = "do not broadcast together") -> ShapeError:
    """The error for two shapes that an operation cannot combine."""
    return ShapeError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} {reason}")


def computed(name: str, function: Callable[..., xp.Array], a: Any, b: Any) -> tuple[Tensor, Tensor, xp.Array]:
    """Return both operands as tensors of one dtype, and function(a, b) of their broadcast arrays."""
    a, b = pair(name, a, b)
    try:
        return a, b, function(a.data, b.data)
    except ValueError:
        raise mismatch(name, a, b) from None


def unbroadcast(gradient: xp.Array, shape: tuple[int, ...]) -> xp.Array:
    """Sum a gradient over the dims that broadcasting added or stretched, so that it has `shape` again."""
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    stretched = tuple(extra + i for i, n in enumerate(shape) if n == 1 and gradient.shape[extra + i] != 1)
    total = xp.upcast(gradient).sum(axis=(*range(extra), *stretched), keepdims=True)
    return xp.downcast(total, gradient.dtype).reshape(shape)


def summed_to(operand: Tensor, result: xp.Array) -> Callable[[xp.Array], xp.Array] | None:
    """The vjp of an operand that was only broadcast to the result's shape: None (identity) for equal shapes."""
    shape = operand.shape
    if shape == result.shape:
        return None
    return lambda g: unbroadcast(g, shape)


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    a, b, data = computed("add", operator.add, a, b)
    return record("add", data, ((a, summed_to(a, data)), (b, summed_to(b, data))))


def mul(a: Any, b: Any) -> Tensor:
    """a * b."""
    a, b, data = computed("mul", operator.mul, a, b)
    kept_a, kept_b, shape_a, shape_b = a.saved(), b.saved(), a.shape, b.shape
    edge_a = a, lambda g: unbroadcast(g * kept_b.data, shape_a)
    edge_b = b, lambda g: unbroadcast(g * kept_a.data, shape_b)
    return record("mul", data, (edge_a, edge_b))


def div(a: Any, b: Any) -> Tensor:
    """a / b."""
    a, b, data = computed("div", operator.truediv, a, b)
    kept_b, shape_a, shape_b = b.saved(), a.shape, b.shape
    edge_a = a, lambda g: unbroadcast(g / kept_b.data, shape_a)
    edge_b = b, lambda g: unbroadcast(-g * data / kept_b.data, shape_b)
    return record("div", data, (edge_a, edge_b))


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The elements in row-major order under another shape, given as a tuple or as numbers; one entry may be -1."""
    wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    old = x.shape
    try:
        data = x.data.reshape(wanted)
    except ValueError:
        raise ShapeError(f"reshape: {x.size} elements of shape {old} do not fill shape {tuple(wanted)}") from None
    except TypeError:
        raise ShapeError(f"reshape: {hooks.quoted(wanted)} is not a shape; pass whole numbers, one may be -1") from None
    return record("reshape", data, ((x, lambda g: g.reshape(old)),), cost=0)


def getitem(x: Tensor, index: Any) -> Tensor:
    """x[index]: slices, integers, None, Ellipsis, arrays of integers or bools (repeats add up in backward)."""
    try:
        data = x.data[index]
    except IndexError as error:
        hooks.operation_checks().refuse_index(x, index, error)
        raise
    shape, kind = x.shape, x.dtype
    parts = index if type(index) is tuple else (index,)
    basic = all(isinstance(part, (int, slice)) or part is None or part is Ellipsis for part in parts)

    def grad(g: xp.Array) -> xp.Array:
        whole = xp.zeros(shape, kind, g)
        if basic:
            whole[index] = g
        else:
            xp.scatter_add(whole, index, g)
        return whole

    return record("getitem", data, ((x, grad),), cost=0)


def axes_of(name: str, x: Tensor, axis: Any) -> tuple[int, ...]:
    """Return the dims that `axis` names, counted from 0; ShapeError for one that x has not."""
    axes = tuple(range(x.ndim)) if axis is None else tuple(axis) if isinstance(axis, Iterable) else (axis,)
    for a in axes:
        if a not in range(-x.ndim, x.ndim):
            raise ShapeError(f"{name}: axis {hooks.quoted(a)} does not exist in shape {x.shape}")
    return tuple(a % x.ndim for a in axes)


def sum(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Sum over one dim, several, or all (None)."""
    axes, shape = axes_of("sum", x, axis), x.shape
    kept_dims = tuple(1 if i in axes else n for i, n in enumerate(shape))
    x = operand(x)
    data = x.data.sum(axis=axes, keepdims=keepdims)
    edges = ((x, lambda g: xp.broadcast_to(g.reshape(kept_dims), shape)),)
    return record("sum", data, edges, cost=x.size)


def mean(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Mean over one dim, several, or all (None); nan over no elements, as in NumPy."""
    if x.dtype.kind in "biu":
        hooks.operation_checks().refuse_mean(x)
    count = prod(x.shape[a] for a in axes_of("mean", x, axis))
    return hooks.named_mean(sum(x, axis, keepdims) * (1 / count if count else float("nan")), f"{count} elements")


Tensor.__add__ = Tensor.__radd__ = add
Tensor.__mul__ = Tensor.__rmul__ = mul
Tensor.__truediv__ = div
Tensor.__getitem__ = getitem
Tensor.sum, Tensor.mean, Tensor.reshape = sum, mean, reshape
hooks.add_tensor_methods(Tensor)
