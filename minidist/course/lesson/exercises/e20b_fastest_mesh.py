"""Lesson 20b: the mesh of replicas and tensor parts that waits least, on paper."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure

Mesh = tuple[int, int]


def setting(case: Case) -> tuple[int, int, float, float, float, float]:
    """Return n, layers, bytes of an activation of the whole batch and of the gradient, alpha and beta."""
    draw = case.generator()
    activation, gradient = 10 ** draw.uniform(4, 7), 10 ** draw.uniform(4, 8)
    alpha, beta = 10 ** draw.uniform(-6, -4), 10 ** draw.uniform(-10, -8)
    return case.size, int(draw.integers(2, 13)), activation, gradient, alpha, beta


# What an answer may leave out, and what is then another number.
MISTAKES: dict[str, dict[str, Any]] = {
    "no_latency": {"alpha": 0.0},
    "whole_activation": {"of_replica": False},
    "whole_gradient": {"of_part": False},
    "one_sum": {"sums": 1},
    "whole_messages": {"of_chunk": False},
}


def waits(
    case: Case,
    alpha: float | None = None,
    of_replica: bool = True,
    of_part: bool = True,
    of_chunk: bool = True,
    sums: int = 4,
) -> dict[Mesh, float]:
    """Return the seconds that each mesh (dp, tp) waits, perhaps with a mistake."""
    n, layers, activation, gradient, latency, beta = setting(case)

    def ring(ranks: int, nbytes: float) -> float:
        chunk = nbytes / ranks if of_chunk else nbytes
        return 2 * (ranks - 1) * ((latency if alpha is None else alpha) + chunk * beta)

    return {
        (n // tp, tp): sums * layers * ring(tp, activation / (n // tp if of_replica else 1))
        + ring(n // tp, gradient / (tp if of_part else 1))
        for tp in range(1, n + 1)
        if n % tp == 0
    }


def best(seconds: dict[Mesh, float]) -> Mesh:
    return min(seconds, key=seconds.__getitem__)


def pair(answer: Any) -> Mesh | None:
    """Return an answer as a mesh, or None when it is none."""
    if np.shape(answer) != (2,) or not all(float(n).is_integer() for n in answer):
        return None
    return int(answer[0]), int(answer[1])


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    seconds, mesh = waits(case), pair(answers[0])
    if mesh is None:
        return "return (dp, tp), two whole numbers"
    if mesh not in seconds:
        return f"dp {mesh[0]} x tp {mesh[1]} is not {case.size} ranks"
    mine, least = seconds[mesh], min(seconds.values())
    if mine > least * (1 + 1e-9):
        return f"{mesh} waits {1e3 * mine:.4g} ms, {best(seconds)} waits {1e3 * least:.4g} ms"
    return ""


def chosen_by(mistake: str) -> Callable[[Failure], bool]:
    """Return whether an answer is the best mesh of a formula with a mistake."""
    return lambda failure: pair(failure.answers[0]) == best(waits(failure.case, **MISTAKES[mistake]))


def alike(case: Case) -> int:
    """Return less, the more mistakes choose a mesh that neither is right nor chosen by another mistake."""
    chosen = Counter([best(waits(case)), *(best(waits(case, **mistake)) for mistake in MISTAKES.values())])
    return -sum(count == 1 for count in chosen.values())


def describe(case: Case) -> str:
    n, layers, activation, gradient, alpha, beta = setting(case)
    return (
        f"n = {n}, {layers} layers, {activation:,.0f} B of activation, {gradient:,.0f} B of gradient,"
        f" alpha = {1e6 * alpha:.3g} µs, 1/beta = {1e-9 / beta:.3g} GB/s"
    )


EXERCISES = [
    Exercise(
        name="20b.fastest_mesh",
        arguments=lambda case, rank: setting(case),
        check_answers=check_answers,
        cases=lambda: sorted((Case(1, n, seed) for n in (1, 2, 8, 24, 60) for seed in range(40)), key=alike),
        draw=lambda draw: Case(1, int(draw.choice([4, 8, 12, 24, 64])), int(draw.integers(2**30))),
        par=Case(1, 8),
        label=describe,
        communicates=False,
        for_hints={mistake: chosen_by(mistake) for mistake in MISTAKES},
    )
]
