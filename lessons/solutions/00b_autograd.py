"""Our solutions of lesson 00b; they are not a part of the package."""

import numpy as np

Shape = tuple[int, ...]


def add_backward(
    gradient: np.ndarray, shape_a: Shape, shape_b: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of a and b: sum that of a + b over every axis along which a value was repeated."""

    def fold(shape: Shape) -> np.ndarray:
        new = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
        stretched = tuple(axis for axis, n in enumerate(shape) if n == 1 and new.shape[axis] > 1)
        return new.sum(axis=stretched, keepdims=True)

    return fold(shape_a), fold(shape_b)


def cross_entropy_backward(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean over rows of -log softmax(logits)[target]: (softmax - one-hot) / rows."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    probabilities[np.arange(len(targets)), targets] -= 1
    return probabilities / len(targets)


SOLUTIONS = {"00b.add_backward": add_backward, "00b.cross_entropy_backward": cross_entropy_backward}
