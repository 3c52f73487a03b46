"""A stage's forward and backward as autograd sees them: leaves that came in, outputs that go out to one stage or
several.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.autograd import Function, Tensor
from minidist.pipeline.runtime.shapes import has_gradient
from minidist.pipeline.runtime.stages import SkipTo


def leaf(array: Any) -> Tensor:
    """What arrived from another stage, as the beginning of this one's graph."""
    return Tensor(array, requires_grad=has_gradient(array.dtype))


def gradient_of(tensor: Tensor) -> Any:
    """The gradient of a leaf; zeros when the stage did not use it."""
    return np.zeros(tensor.shape, tensor.dtype) if tensor.grad is None else tensor.grad


def by_target(result: Any, stage: int) -> dict[int, list[Tensor]]:
    """A module's outputs by the stage that they go to; what is no SkipTo goes to the next one."""
    outputs: dict[int, list[Tensor]] = {stage + 1: []}
    for value in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(value, SkipTo):
            outputs.setdefault(value.stage, []).append(value.tensor)
        else:
            outputs[stage + 1].append(value)
    return outputs


def backward_from(outputs: Sequence[Tensor], gradients: Sequence[Any], weights: str) -> Any:
    """Backward from several outputs in one walk, so that what they share is visited once. weights: "now" or "deferred"."""
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad]
    if not pairs:
        return None  # nothing in the stage is trained and nothing before it either
    if len(pairs) == 1:
        output, gradient = pairs[0]
        return output.backward(gradient, weight_gradients=weights)
    together = _Together.apply([gradient for _, gradient in pairs], *[output for output, _ in pairs])
    return together.backward(weight_gradients=weights)


class _Together(Function):
    """Several outputs of one stage as one root."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *outputs: Any) -> Any:
        ctx.gradients = gradients
        return np.zeros((), outputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(ctx.gradients)
