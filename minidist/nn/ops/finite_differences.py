"""Compare gradients with finite differences, element by element, in float64.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_fused.py
"""

from collections.abc import Callable
from typing import Any

from minidist.base import arrays as xp
from minidist.core.autograd.parameter import Parameter
from minidist.core.autograd.tensor import Tensor, no_grad


def gradcheck(
    fn: Callable[..., Tensor], *inputs: Any, eps: float = 1e-6, tolerance: float = 1e-6, parameters: bool = False
) -> float:
    """The largest error of fn's gradients, relative to max(1, |finite difference|); AssertionError above `tolerance`.

    inputs: float64 arrays, which are all differentiated. fn takes as many tensors and returns one, which is weighted
    with fixed irregular numbers so that errors of different outputs cannot cancel. parameters=True passes Parameters.
    """
    arrays = [xp.array(a, xp.float64) for a in inputs]
    tensors = [
        Parameter(a, name=f"input {i}") if parameters else Tensor(a, requires_grad=True) for i, a in enumerate(arrays)
    ]
    output = fn(*tensors)
    weights = xp.tanh(1.7 + xp.arange(output.size) * 1.3 % 2.1).reshape(output.shape)
    if output.requires_grad:
        output.backward(weights)

    def value() -> float:
        with no_grad():
            return float((fn(*tensors).data * weights).sum())

    worst = 0.0
    for number, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        gradient = xp.zeros_like(array) if tensor.grad is None else tensor.grad
        assert gradient.shape == array.shape, f"gradient {number} has shape {gradient.shape}, the input {array.shape}"
        assert gradient.dtype == array.dtype, f"gradient {number} is {gradient.dtype}, the input {array.dtype}"
        flat, flat_gradient = array.reshape(-1), gradient.reshape(-1)
        for i in range(array.size):
            before = flat[i]
            flat[i] = before + eps
            above = value()
            flat[i] = before - eps
            below = value()
            flat[i] = before
            numeric = (above - below) / (2 * eps)
            error = abs(numeric - float(flat_gradient[i])) / max(1.0, abs(numeric))
            assert error <= tolerance, (
                f"gradient of input {number} at flat index {i} is {float(flat_gradient[i])!r}; "
                f"finite differences say {numeric!r}"
            )
            worst = max(worst, error)
    return worst
