"""Lesson 02: one step of three layers with as few bytes alive as possible."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidist.base.memory import MemoryAccount
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing

# rows, widths: sometimes the activations are the larger part, sometimes the weights
SHAPES = [
    (4, (2, 2, 2, 2)),
    (40, (3, 3, 3, 3)),
    (2, (9, 9, 9, 9)),
    (8, (3, 7, 5, 6)),
    (30, (5, 4, 9, 2)),
    (5, (9, 2, 8, 3)),
    (16, (16, 16, 16, 16, 16)),
]


class Layer:
    """y = x W with whole numbers. Every array that it makes is counted until its last reference is gone."""

    def __init__(self, weight: np.ndarray, account: MemoryAccount) -> None:
        self.account = account
        self.weight = account.track(weight, "parameter")

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return the layer's output, from its input."""
        return self.account.track(x @ self.weight, "activation")

    def weight_gradient(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Return the weight's gradient, from the layer's input and the gradient of its output."""
        return self.account.track(x.T @ g, "gradient")

    def input_gradient(self, g: np.ndarray) -> np.ndarray:
        """Return the input's gradient, from the gradient of the output and the present weight."""
        return self.account.track(g @ self.weight.T, "activation_gradient")

    def update(self, weight_gradient: np.ndarray) -> None:
        """Make one step of SGD."""
        self.weight -= weight_gradient


class Run:
    """The arrays of one case and their account."""

    def __init__(self, comm: Comm | None, x: np.ndarray, weights: Sequence[np.ndarray]) -> None:
        self.comm = comm
        self.account = MemoryAccount(timeline=True)
        self.x = self.account.track(x, "input")
        self.layers = [Layer(weight, self.account) for weight in weights]

    def loss_gradient(self, y: np.ndarray) -> np.ndarray:
        """Return the gradient of half the sum of squares: a copy of y."""
        return self.account.track(y.copy(), "activation_gradient")

    def weights(self) -> tuple[np.ndarray, ...]:
        return tuple(layer.weight for layer in self.layers)


def data(case: Case, rank: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the input and the weights of all layers."""
    rows, widths = SHAPES[case.size]
    draw = case.generator()
    x = draw.integers(-3, 4, (rows, widths[0])) * 1.0
    return x, [draw.integers(-3, 4, shape) * 1.0 for shape in pairwise(widths)]


def setup(comm: Comm, x: np.ndarray, weights: Sequence[np.ndarray]) -> tuple[Any, ...]:
    run = Run(comm, x, weights)
    return run.layers, run.x, run.loss_gradient


def answer(arguments: tuple[Any, ...], returned: Any) -> Any:
    """Return the weights after the step; write the account into the trace."""
    run: Run = arguments[2].__self__
    assert run.comm is not None
    run.comm.trace.memory.extend((0.0, live) for live in run.account.history())
    return run.weights()


def truth(case: Case, update_first: bool = False) -> list[tuple[np.ndarray, ...]]:
    """Return the weights after the step, computed without any account of memory."""
    run = Run(None, *data(case))
    inputs = [run.x]
    for layer in run.layers:
        inputs.append(inputs[-1] @ layer.weight)
    g = inputs.pop()
    for layer in reversed(run.layers):
        before = layer.weight.copy()
        layer.weight -= inputs.pop().T @ g
        g = g @ (layer.weight if update_first else before).T
    return [run.weights()]


def some_untouched(failure: Failure) -> bool:
    """Return whether a layer, and not every one, has the weight that it began with."""
    pairs = zip(failure.answers[0], data(failure.case)[1], strict=True)
    same = [np.array_equal(got, before) for got, before in pairs]
    return failure.kind == "wrong" and any(same) and not all(same)


def history(failure: Failure) -> list[dict[str, int]]:
    """Return the live bytes after each event of a run that was right and above par."""
    return [live for _, live in failure.traces[0].memory] if failure.metric == "memory" else []


def keeps_activations(failure: Failure) -> bool:
    """Return whether an activation is alive when the last weight gradient (which needs only the input) is made."""
    gradients = [live.get("gradient", 0) for live in history(failure)]
    births = [i for i in range(1, len(gradients)) if gradients[i] > gradients[i - 1]]
    return bool(births) and history(failure)[births[-1]].get("activation", 0) > 0


def keeps_gradients(failure: Failure) -> bool:
    """Return whether two weight gradients are alive at once."""
    gradients = [0, *(live.get("gradient", 0) for live in history(failure))]
    return any(0 < before < after for before, after in pairwise(gradients))


def changed(case: Case, times: float) -> list[tuple[np.ndarray, ...]]:
    """Return the weights when each of them changes `times` times as much as it should."""
    before, after = data(case)[1], truth(case)[0]
    return [tuple(w + times * (a - w) for w, a in zip(before, after, strict=True))]


EXERCISES = [
    Exercise(
        name="02.free_in_order",
        arguments=data,
        setup=setup,
        expected=truth,
        answer=answer,
        cases=lambda: [Case(1, size) for size in range(len(SHAPES))],
        draw=drawing((1, 1), (0, len(SHAPES) - 1)),
        par=Case(1, len(SHAPES) - 1),
        label=lambda case: "{} rows, widths {}".format(*SHAPES[case.size]),
        limits=("memory",),
        communicates=False,
        for_hints={
            "updated_too_early": lambda f: f.answers_are(truth(f.case, update_first=True)),
            "untouched": lambda f: f.answers_are([tuple(data(f.case)[1])]),
            "wrong_or_raised": lambda f: f.kind == "wrong" or f.raised(ValueError),
        },
    )
]
