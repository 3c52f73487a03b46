"""What every operation does with its operands before it computes: scalars become arrays of the tensor's dtype, dtypes
must agree, and the gradient of a broadcast operand is summed back to the operand's shape.

Proved by: tests/autograd/test_refusals.py, tests/autograd/test_half.py
"""

from collections.abc import Callable
from typing import Any

from minidist.core.autograd.errors import ShapeError
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import downcast, is_half, upcast


def as_tensor(value: Any, like: Tensor) -> Tensor:
    """`value` as a tensor. Any Python or NumPy scalar takes the dtype of `like`; so do arrays of integers or bools."""
    if isinstance(value, Tensor):
        return value
    if xp.is_array(value) and value.ndim > 0 and value.dtype.kind not in "biu":
        return Tensor(value)
    if like.dtype.kind in "biu" and getattr(value, "ndim", 0) == 0 and hasattr(value, "__mod__") and value % 1 != 0:
        hooks.operation_checks().refuse_scalar(value, like)
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
    if a.dtype.itemsize == 2 and is_half(a.dtype):
        return operand(a), operand(b)
    return a, b


def operand(x: Tensor) -> Tensor:
    """x as an operation sees it that computes in float32: x itself, or a `HalfOperand` when it is half precision."""
    return hooks.precision().HalfOperand(x) if x.dtype.itemsize == 2 and is_half(x.dtype) else x


def mismatch(name: str, a: Any, b: Any, reason: str = "do not broadcast together") -> ShapeError:
    """The error for two shapes that an operation cannot combine."""
    return ShapeError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} {reason}")


def unbroadcast(gradient: xp.Array, shape: tuple[int, ...]) -> xp.Array:
    """Sum a gradient over the dims that broadcasting added or stretched, so that it has `shape` again."""
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    stretched = tuple(extra + i for i, n in enumerate(shape) if n == 1 and gradient.shape[extra + i] != 1)
    return downcast(upcast(gradient).sum(axis=(*range(extra), *stretched), keepdims=True), gradient.dtype).reshape(
        shape
    )


def summed_to(operand: Tensor, result: xp.Array) -> Callable[[xp.Array], xp.Array] | None:
    """The vjp of an operand that was only broadcast to the result's shape: None (identity) for equal shapes."""
    shape = operand.shape
    if shape == result.shape:
        return None
    return lambda g: unbroadcast(g, shape)
