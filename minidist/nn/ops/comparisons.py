"""Operations that choose between two elements, and the sigmoid. Two operands broadcast as in NumPy.

Proved by: tests/autograd/test_operations.py
"""

from typing import Any

from minidist.base import arrays as xp
from minidist.core.autograd.operators import computed, mismatch, operand, pair, unbroadcast
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base.errors import AutogradError
from minidist.nn.ops.functions import neg


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), through tanh so that nothing overflows."""
    x = operand(x)
    result = x.save(xp.tanh(x.data * 0.5) * 0.5 + 0.5)

    def grad(g: xp.Array) -> xp.Array:
        y = result.data
        return g * (y * (1 - y))

    return record("sigmoid", result.stored, ((x, grad),))


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of two; where they are equal each gets half of the gradient."""
    a, b, data = computed("maximum", xp.maximum, a, b)
    kept_a, kept_b, shape_a, shape_b = a.saved(), b.saved(), a.shape, b.shape

    def share(of: Any, other: Any) -> Any:
        return xp.as_array((xp.as_array(of > other, data.dtype) + (of >= other)) * 0.5, data.dtype)

    return record(
        "maximum",
        data,
        (
            (a, lambda g: unbroadcast(g * share(kept_a.data, kept_b.data), shape_a)),
            (b, lambda g: unbroadcast(g * share(kept_b.data, kept_a.data), shape_b)),
        ),
    )


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of two."""
    a, b = pair("minimum", a, b)
    return neg(maximum(neg(a), neg(b)))


def absolute(x: Tensor) -> Tensor:
    """|x|; the gradient at 0 is 0."""
    kept = x.saved()
    return record("absolute", xp.absolute(x.data), ((x, lambda g: g * xp.sign(kept.data)),))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition (an array of bools, no tensor) is true, else b."""
    if isinstance(condition, Tensor):
        raise AutogradError(
            "where: the condition must be an array of bools, not a Tensor; compare the .data of tensors"
        )
    condition = xp.as_array(condition)
    a, b = pair("where", a, b)
    try:
        data = xp.where(condition, a.data, b.data)
    except ValueError:
        raise mismatch("where", a, b, f"do not broadcast with a condition of shape {condition.shape}") from None
    shape_a, shape_b = a.shape, b.shape
    return record(
        "where",
        data,
        ((a, lambda g: unbroadcast(g * condition, shape_a)), (b, lambda g: unbroadcast(g * ~condition, shape_b))),
    )
