"""How wrong numbers differ from the right ones, in words that fit any exercise: n times, in another order.

Each pattern makes the typical mistake from the right answers, or from what the function was given, and compares. The
first that explains every rank is said.

Proved by: tests/lesson/test_answer_patterns.py, tests/lesson/test_bank.py
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Exercise, Failure, difference

Arrays = list[np.ndarray]
Arguments = dict[str, Arrays]  # what an argument is called, and what it is on each rank
CAUSES = {
    "n": "a sum where the mean is asked, or one addition too many on each rank",
    "1/n": "a mean where the sum is asked, or divided twice",
    "2": "something is added twice",
    "1/2": "a part is missing, or a factor 2 of a derivative",
    "-1": "a sign",
}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
FEW = 3  # numbers: an array of 3 numbers or fewer may be a multiple of another one by chance


def pattern_of(failure: Failure, exercise: Exercise | None = None) -> str:
    """Return a sentence on how the answers differ from the expected ones; "" where no pattern fits.

    exercise: whose arguments the answers are compared with, too; None leaves them out.
    """
    return _said(failure, exercise, _patterns)


def places_of(failure: Failure) -> str:
    """Return which ranks or entries alone are wrong, which says where to look and not why; "" where most are."""
    return _said(failure, None, _places)


def _said(failure: Failure, exercise: Exercise | None, patterns: Any) -> str:
    if failure.kind != "wrong" or not failure.expected:
        return ""
    try:
        got, wanted = list(failure.answers), list(failure.expected)
        given = {} if exercise is None or exercise.setup is not None else _arguments(exercise, failure)
        if isinstance(wanted[0], tuple):
            return _of_several(got, wanted, given, patterns)
        return next(patterns(_arrays(got), _arrays(wanted), given), "")
    except Exception:  # whatever arithmetic raises that meets an answer of another form than numbers
        return ""


def _arrays(values: Sequence[Any]) -> Arrays:
    return [np.asarray(value, float) for value in values]


def _arguments(exercise: Exercise, failure: Failure) -> Arguments:
    """Return the arguments that are an array on every rank."""
    ranks, behind = (failure.case.ranks, " after comm") if exercise.communicates else (1, "")
    columns = zip(*(exercise.arguments(failure.case, rank) for rank in range(ranks)), strict=True)
    return {
        f"the {number} argument{behind}": _arrays(column)
        for number, column in zip(ORDINALS, columns, strict=False)
        if all(isinstance(a, np.ndarray) for a in column)
    }


def _of_several(got: list[Any], wanted: list[Any], given: Arguments, patterns: Any) -> str:
    """Return what is wrong with answers of several arrays as a whole, else the pattern of the first wrong one."""
    whole = _as_a_whole(got, wanted) if patterns is _patterns else ""
    if whole or any(not isinstance(a, tuple | list) for a in got):
        return whole
    pairs = list(zip(got, wanted, strict=True))
    wrong = next(i for i in range(len(wanted[0])) if any(difference(a[i], e[i], 1e-9) for a, e in pairs))
    found = next(patterns(_arrays([a[wrong] for a in got]), _arrays([e[wrong] for e in wanted]), given), "")
    return f"result {wrong}: {found}" if found else ""


def _as_a_whole(got: list[Any], wanted: list[Any]) -> str:
    """Return what is wrong with the number of the results, or with their order."""
    count = len(wanted[0])
    if any(not isinstance(a, tuple | list) or len(a) != count for a in got):
        return f"{count} values are asked for: return them as a tuple, in the order of the task"
    pairs = list(zip(got, wanted, strict=True))
    if count == 1 or not any(np.size(part) for e in wanted for part in e):
        return ""
    if all(not difference(tuple(a), tuple(e[::-1]), 1e-9) for a, e in pairs):
        return "the results are right and exchanged: return them in the order of the task"
    if count == 2 and all(not difference(a[1], e[0], 1e-9) for a, e in pairs):
        return "the second result is the first one once more"
    return ""


def _patterns(got: Arrays, wanted: Arrays, given: Arguments) -> Iterator[str]:
    """Yield the sentences that fit, the surest first."""
    if all(a.ndim == 2 and a.shape == e.T.shape and _same(a, e.T) for a, e in zip(got, wanted, strict=True)):
        yield "the right numbers, transposed: rows and columns are exchanged"
    if any(a.shape != e.shape for a, e in zip(got, wanted, strict=True)) or not any(e.size for e in wanted):
        return
    everything, right = (np.concatenate([each.reshape(-1) for each in side]) for side in (got, wanted))
    for name, argument in given.items():
        if _tells(everything) and all(_same(a, e) for a, e in zip(got, argument, strict=True)):
            yield f"this is {name} as it came in"
    yield from _multiples(everything, right, len(wanted))
    yield from _misplaced(got, wanted)
    yield from _too_much(got, wanted, given)


def _multiples(everything: np.ndarray, right: np.ndarray, ranks: int) -> Iterator[str]:
    """Yield the one factor of all entries of all ranks."""
    if not np.any(right):
        return
    for factor, name in _factors(ranks):
        if np.allclose(everything, factor * right, rtol=1e-9, atol=1e-12):
            yield f"every number is {name} times the expected one: {CAUSES[name]}"
    scale = float(everything @ right) / float(right @ right)
    if scale and _tells(right) and np.allclose(everything, scale * right, rtol=1e-9, atol=1e-12):
        if 1e-3 <= abs(scale) <= 1e3:
            yield f"every number is {scale:.4g} times the expected one: one factor is missing, or one too many"
        else:
            yield "the numbers are what was in memory before: nothing was received into the array"


def _misplaced(got: Arrays, wanted: Arrays) -> Iterator[str]:
    """Yield where the right numbers are, if all of them are somewhere else."""
    ranks = len(wanted)
    if all(_same(a, e) for a, e in zip(got, wanted, strict=True)):  # wrong in the last bits alone
        return
    if ranks > 1 and all(_same(a, e) for a, e in zip(got, wanted[::-1], strict=True)):
        yield "the ranks have each other's answers, in the reverse order: is it rank or n - 1 - rank?"
    for shift, other in ((1, "next"), (-1, "previous")):
        if ranks > 2 and all(_same(a, wanted[(r + shift) % ranks]) for r, a in enumerate(got)):
            yield f"every rank has the answer of the {other} rank: an index is off by one"
    if all(a.ndim and _same(a, np.flip(e)) for a, e in zip(got, wanted, strict=True)):
        yield "the right numbers in the reverse order"


def _factors(ranks: int) -> list[tuple[float, str]]:
    """Return the factors that have a cause. With two ranks n is more often it than 2 is."""
    counts = [(float(ranks), "n"), (1 / ranks, "1/n")] if ranks > 1 else []
    return [*counts, *(pair for pair in ((2.0, "2"), (0.5, "1/2")) if ranks != 2), (-1.0, "-1")]


def _too_much(got: Arrays, wanted: Arrays, given: Arguments) -> Iterator[str]:
    """Yield which multiple of an argument was added to the right numbers, or left out."""
    wrong = np.concatenate([(a - e).reshape(-1) for a, e in zip(got, wanted, strict=True)])
    for name, argument in given.items():
        if any(a.shape != e.shape[e.ndim - a.ndim :] for a, e in zip(argument, wanted, strict=True)):
            continue
        flat = np.concatenate([np.broadcast_to(a, e.shape).reshape(-1) for a, e in zip(argument, wanted, strict=True)])
        times = float(wrong @ flat) / float(flat @ flat) if np.any(flat) else 0.0
        if _tells(flat) and times and np.allclose(wrong, times * flat, rtol=1e-9, atol=1e-9):
            much = "" if np.isclose(abs(times), 1) else f"{abs(times):.4g} times "
            yield f"the right numbers {'plus' if times > 0 else 'minus'} {much}{name}"


def _places(got: Arrays, wanted: Arrays, given: Arguments) -> Iterator[str]:
    """Yield that shapes differ, or which ranks, or which entries of one rank's answer, are wrong and others right."""
    ranks = len(wanted)
    if all(a.ndim == e.ndim and a.shape != e.shape for a, e in zip(got, wanted, strict=True)):
        yield "the answer has another shape than it should: which slice, or which axis, decides it?"
    wrong = [rank for rank, (a, e) in enumerate(zip(got, wanted, strict=True)) if not _same(a, e)]
    if ranks > 1 and len(wrong) < ranks:
        yield f"right on the other ranks, wrong on rank{'s' * (len(wrong) > 1)} {_listed(wrong)}"
    if ranks == 1 and got[0].shape == wanted[0].shape:
        places = np.flatnonzero(~np.isclose(got[0].reshape(-1), wanted[0].reshape(-1), rtol=1e-9, atol=1e-12))
        if 0 < places.size <= wanted[0].size // 2:
            yield f"right but for {places.size} of {wanted[0].size} entries: those at {_listed(places.tolist())}"


def _tells(numbers: np.ndarray) -> bool:
    """Return whether there are enough numbers that two arrays of them are not multiples of each other by chance."""
    return bool(np.count_nonzero(numbers) > FEW)


def _same(a: np.ndarray, e: np.ndarray) -> bool:
    return a.shape == e.shape and bool(np.allclose(a, e, rtol=1e-9, atol=1e-12))


def _listed(numbers: Sequence[Any]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
