"""How wrong numbers differ from the right ones, in words that fit any exercise: n times, in another order.

Each pattern makes the typical mistake from the right answers and compares. The first that explains every rank is said.

Proved by: tests/lesson/test_answer_patterns.py
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Failure, difference

Arrays = list[np.ndarray]
CAUSES = {
    "n": "a sum where the mean is asked, or one addition too many on each rank",
    "1/n": "a mean where the sum is asked, or divided twice",
    "2": "something is added twice",
    "1/2": "a part is missing, or a factor 2 of a derivative",
    "-1": "a sign",
}


def pattern_of(failure: Failure) -> str:
    """Return a sentence on how the answers differ from the expected ones; "" where no pattern fits."""
    if failure.kind != "wrong" or not failure.expected:
        return ""
    try:
        return _pattern(list(failure.answers), list(failure.expected), failure.case.ranks)
    except Exception:  # whatever arithmetic raises that meets an answer of another form than numbers
        return ""


def _pattern(got: list[Any], wanted: list[Any], ranks: int) -> str:
    # Of an answer of several arrays, the pattern of the first one that is wrong.
    result = ""
    if isinstance(wanted[0], tuple):
        pairs = list(zip(got, wanted, strict=True))
        wrong = next(i for i in range(len(wanted[0])) if any(difference(a[i], e[i], 1e-9) for a, e in pairs))
        got, wanted, result = [a[wrong] for a in got], [e[wrong] for e in wanted], f"result {wrong}: "
    found = next(_patterns([np.asarray(a, float) for a in got], [np.asarray(e, float) for e in wanted], ranks), "")
    return result + found if found else ""


def _patterns(got: Arrays, wanted: Arrays, ranks: int) -> Iterator[str]:
    """Yield the sentences that fit, the surest first."""
    if any(a.shape != e.shape for a, e in zip(got, wanted, strict=True)):
        if all(a.shape == e.T.shape and np.allclose(a, e.T) for a, e in zip(got, wanted, strict=True)):
            yield "the right numbers, transposed: rows and columns are exchanged"
        return

    # One factor for all entries of all ranks.
    everything, right = (np.concatenate([each.reshape(-1) for each in side]) for side in (got, wanted))
    for factor, name in [(2.0, "2"), (0.5, "1/2"), (-1.0, "-1"), (ranks, "n"), (1 / ranks, "1/n")]:
        if factor != 1 and np.any(right) and np.allclose(everything, factor * right, rtol=1e-9, atol=1e-12):
            yield f"every number is {name} times the expected one: {CAUSES[name]}"

    # The right numbers in wrong places.
    if ranks > 1 and all(_same(a, e) for a, e in zip(got, wanted[::-1], strict=True)):
        yield "the ranks have each other's answers, in the reverse order: is it rank or n - 1 - rank?"
    for shift, other in ((1, "next"), (-1, "previous")):
        if ranks > 2 and all(_same(a, wanted[(r + shift) % ranks]) for r, a in enumerate(got)):
            yield f"every rank has the answer of the {other} rank: an index is off by one"
    if all(a.ndim and _same(a, np.flip(e)) for a, e in zip(got, wanted, strict=True)) and not _same(right, got[0]):
        yield "the right numbers in the reverse order"

    # The right numbers on some ranks, or but for some entries.
    wrong = [rank for rank, (a, e) in enumerate(zip(got, wanted, strict=True)) if not _same(a, e)]
    if ranks > 1 and len(wrong) < ranks:
        yield f"right on the other ranks, wrong on rank{'s' * (len(wrong) > 1)} {_listed(wrong)}"
    places = np.flatnonzero(~np.isclose(everything, right, rtol=1e-9, atol=1e-12))
    if ranks == 1 and 0 < places.size <= right.size // 2:
        yield f"right but for {places.size} of {right.size} entries: those at {_listed(places.tolist())}"


def _same(a: np.ndarray, e: np.ndarray) -> bool:
    return a.shape == e.shape and bool(np.allclose(a, e, rtol=1e-9, atol=1e-12))


def _listed(numbers: Sequence[Any]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
