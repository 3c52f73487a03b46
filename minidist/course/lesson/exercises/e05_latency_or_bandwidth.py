"""Lesson 05: recursive halving and doubling for any number of ranks, and which algorithm is cheapest."""

from collections.abc import Sequence
from typing import Any

from minidist.collectives.closed_forms import seconds
from minidist.core.base.errors import MismatchError, UsageError
from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing, is_wrong, reduced_to_all
from minidist.course.lesson.exercises.e04_ring_all_reduce import data, total, unchanged

NAMES = ("binomial", "recursive_doubling", "rabenseifner", "ring")


def is_power(n: int) -> bool:
    return n & (n - 1) == 0


def setting(case: Case) -> tuple[int, float, float, float]:
    """Return n, bytes, alpha and beta of a case; latencies from 0.1 µs to 1 ms, links from 10 MB/s to 100 GB/s."""
    draw = case.generator()
    return 2**case.size, 2 ** draw.uniform(3, 27), 10 ** draw.uniform(-7, -3), 10 ** draw.uniform(-11, -7)


def costs_of(case: Case) -> dict[str, float]:
    n, size, alpha, beta = setting(case)
    return {name: seconds("all_reduce", name, size, n, alpha, beta) for name in NAMES}


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    name, costs = answers[0], costs_of(case)
    if name not in costs:
        return f"{name!r} is none of {', '.join(NAMES)}"
    best = min(costs, key=costs.__getitem__)
    if costs[name] > costs[best] * (1 + 1e-6):
        return f"{name} takes {1e6 * costs[name]:.4g} µs, {best} only {1e6 * costs[best]:.4g} µs"
    return ""


def answered(failure: Failure, *names: str) -> bool:
    return failure.kind == "wrong" and failure.answers[0] in names


def is_close(case: Case) -> bool:
    """Return whether an algorithm is not as cheap as the best one and takes less than a fifth longer."""
    costs = costs_of(case).values()
    return any(min(costs) * (1 + 1e-6) < cost < 1.2 * min(costs) for cost in costs)


def describe(case: Case) -> str:
    n, size, alpha, beta = setting(case)
    return f"n = {n}, S = {size:,.0f} B, alpha = {1e6 * alpha:.3g} µs, 1/beta = {1e-9 / beta:.3g} GB/s"


EXERCISES = [
    Exercise(
        name="05.halving_doubling",
        arguments=lambda case, rank: (data(case, rank),),
        expected=total,
        answer=lambda arguments, returned: arguments[0],
        least=reduced_to_all(lambda case: case.size),
        par=Case(6, 16),
        limits=("messages", "bytes"),
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        for_hints={
            "ranks_are_a_power": lambda f: unchanged(f) and f.case.ranks > 1 and is_power(f.case.ranks),
            "beyond_the_ranks": lambda f: (
                (f.raised(UsageError) and "names rank" in f.message)
                or (f.raised(IndexError) and (not is_power(f.case.ranks)))
            ),
            "ranks_are_no_power": lambda f: not is_power(f.case.ranks),
            "mismatch_or_wrong": lambda f: f.raised(MismatchError) or (is_wrong(f) and is_power(f.case.ranks)),
        },
    ),
    Exercise(
        name="05.choose",
        arguments=lambda case, rank: setting(case),
        expected=lambda case: [min(costs_of(case), key=costs_of(case).__getitem__)],
        check_answers=check_answers,
        written_by_hand=("minidist.collectives.auto", "minidist.collectives.closed_forms"),
        # A wrong choice is shown where it costs most; the others are where two algorithms cost nearly the same.
        cases=lambda: sorted((Case(1, k, seed) for k in range(1, 11) for seed in range(12)), key=is_close),
        draw=drawing((1, 1), (1, 12)),
        par=Case(1, 4),
        label=describe,
        communicates=False,
        for_hints={"no_name": lambda f: f.answers[0] not in NAMES},
    ),
]
