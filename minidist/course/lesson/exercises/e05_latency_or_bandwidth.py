"""Lesson 05: recursive halving and doubling for any number of ranks, and which algorithm is cheapest.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.collectives.closed_forms import seconds
from minidist.core.base.errors import DeadlockError, MismatchError, UsageError
from minidist.course.lesson.exercise import Case, Exercise, Failure, Hint, drawing, is_wrong, reduced_to_all
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
        hints=(
            Hint(
                lambda f: unchanged(f) and f.case.ranks > 1 and is_power(f.case.ranks),
                "the array is as it was: the sum must be written into it, and size // 2 is one element short when the"
                " size is odd",
            ),
            Hint(
                lambda f: (
                    (f.raised(UsageError) and "names rank" in f.message)
                    or (f.raised(IndexError) and not is_power(f.case.ranks))
                ),
                "rank xor distance is a rank only when n is a power of two: let the ranks beyond the largest power of"
                " two send their part to another rank first, and wait for the sum",
            ),
            Hint(
                lambda f: f.raised(DeadlockError) and not is_power(f.case.ranks),
                "a rank beyond the largest power of two sends its part to another rank, which must receive it, and"
                " waits for the sum, which must be sent back",
            ),
            Hint(
                lambda f: f.raised(MismatchError) or (is_wrong(f) and is_power(f.case.ranks)),
                "in the halving what comes in is added to the half that is kept, in the doubling it is written beside"
                " what is known, until the whole array is. Where does the array end up cut? size // 2 twice is"
                " one element short when the size is odd, and what one rank keeps must be what its partner gives: cut"
                " once, into as many chunks as ranks take part, and exchange runs of chunks",
            ),
            Hint(
                lambda f: f.kind == "limit" and f.metric == "messages",
                "the sums are right in more messages than 2 log2 n (and two for a rank that works for another): that is"
                " a ring's number, or a boss's",
            ),
            Hint(
                lambda f: f.kind == "limit" and f.metric == "bytes",
                "the sums are right, but whole arrays travel in every round: that is recursive doubling. Send"
                " half, then a quarter, then an eighth",
            ),
            Hint(
                lambda f: f.kind == "wrong" and not is_power(f.case.ranks),
                "right when n is a power of two. Is the part of every rank beyond it in the sum, and does each of them"
                " get the sum back?",
            ),
        ),
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
        hints=(
            Hint(
                lambda f: f.kind == "wrong" and f.answers[0] not in NAMES,
                "return the name of an algorithm: binomial, recursive_doubling, rabenseifner or ring",
            ),
            Hint(
                lambda f: answered(f, "ring"),
                "a ring sends as few bytes as rabenseifner, in 2 (n-1) messages instead of 2 log2 n: count the"
                " latencies too",
            ),
            Hint(
                lambda f: answered(f, "binomial"),
                "a tree up and a tree down take 2 log2 n rounds with the whole array; recursive doubling needs half of"
                " them",
            ),
            Hint(
                lambda f: answered(f, "recursive_doubling"),
                "here bytes decide: recursive doubling sends the whole array in each of its log2 n rounds, rabenseifner"
                " 2 (n-1)/n of it in all. Compare alpha with beta times what is saved",
            ),
            Hint(
                lambda f: answered(f, "rabenseifner"),
                "here latency decides: rabenseifner has twice as many rounds as recursive doubling. The crossover"
                " depends on n, alpha and beta, not on the bytes alone",
            ),
        ),
    ),
]
