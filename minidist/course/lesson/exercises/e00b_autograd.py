"""Lesson 00b: two backward functions, compared with minidist's own autograd."""

import numpy as np

from minidist.core.autograd import Tensor, cross_entropy
from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing

Shape = tuple[int, ...]
SHAPES: list[tuple[Shape, Shape]] = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((2, 1), (2, 3)),
    ((2, 3), ()),
    ((4, 1, 3), (2, 1)),
    ((1, 1), (5, 1)),
]


def add_arguments(case: Case, rank: int) -> tuple[np.ndarray, Shape, Shape]:
    a, b = SHAPES[case.size]
    return case.generator().integers(-9, 9, np.broadcast_shapes(a, b)).astype(float), a, b


def add_truth(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the gradients that minidist's autograd computes."""
    a, b = (Tensor(np.zeros(shape), requires_grad=True) for shape in SHAPES[case.size])
    gradient, _, _ = add_arguments(case, 0)
    (a + b).backward(gradient)
    return [(a.grad, b.grad)]  # type: ignore[list-item]


def scores(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, 5) logits and their targets; the larger cases have logits that overflow exp."""
    draw = case.generator()
    scale = 1.0 if case.size < 4 else 1000.0
    return draw.standard_normal((case.size, 5)) * scale, draw.integers(0, 5, case.size)


def scores_truth(case: Case) -> list[np.ndarray]:
    logits, targets = scores(case)
    leaf = Tensor(logits, requires_grad=True)
    cross_entropy(leaf, targets).backward()
    return [leaf.grad]  # type: ignore[list-item]


def times_rows(failure: Failure) -> bool:
    rows = failure.case.size
    return failure.kind == "wrong" and rows > 1 and failure.answers_are([failure.expected[0] * rows])


def without_target(failure: Failure) -> bool:
    _, targets = scores(failure.case)
    one_hot = np.eye(5)[targets]
    return failure.kind == "wrong" and failure.answers_are([failure.expected[0] + one_hot / len(targets)])


def subtracted(case: Case, what: str) -> list[np.ndarray]:
    """Return the gradient when what is subtracted at the target is not 1 / rows in each row."""
    _, targets = scores(case)
    right, one_hot = scores_truth(case)[0], np.eye(5)[targets]
    probabilities = right + one_hot / len(targets)
    columns = np.isin(np.arange(5), targets) / len(targets)
    return [probabilities - {"whole": one_hot, "columns": columns, "plus": -one_hot / len(targets)}[what]]


def not_a_softmax_of_rows(failure: Failure) -> bool:
    """Return whether what is subtracted from is not a probability in each row."""
    _, targets = scores(failure.case)
    got = np.asarray(failure.answers[0]) * len(targets) + np.eye(5)[targets]
    return failure.kind == "wrong" and not np.allclose(got.sum(axis=1), 1)


EXERCISES = [
    Exercise(
        name="00b.add_backward",
        arguments=add_arguments,
        expected=add_truth,
        cases=lambda: [Case(1, size) for size in range(len(SHAPES))],
        draw=drawing((1, 1), (0, len(SHAPES) - 1)),
        par=Case(1, 0),
        label=lambda case: "a of shape {}, b of shape {}".format(*SHAPES[case.size]),
        communicates=False,
        for_hints={
            "exchanged": lambda f: f.answers_are([f.expected[0][::-1]]),
            "an_axis_was_added": lambda f: f.case.size in (1, 2),
        },
    ),
    Exercise(
        name="00b.cross_entropy_backward",
        arguments=lambda case, rank: scores(case),
        expected=scores_truth,
        cases=lambda: [Case(1, size) for size in range(1, 8)],
        draw=drawing((1, 1), (1, 12)),
        par=Case(1, 4),
        unit="row",
        communicates=False,
        for_hints={
            "not_a_number": lambda f: bool(np.isnan(np.asarray(f.answers[0], float)).any()),
            "sign_is_reversed": lambda f: f.answers_are([-f.expected[0]]),
        },
    ),
]
