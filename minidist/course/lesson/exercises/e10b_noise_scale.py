"""Lesson 10b: the gradient of uneven shares and its noise, from one all-reduce.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing, is_wrong, reduced_to_all, standard_cases
from minidist.course.lesson.hint_file import hints_of

WIDTH = 3  # numbers of a row's gradient


def shares_of(case: Case) -> list[int]:
    return [1 + int(case.generator(rank).integers(0, case.size + 1)) for rank in range(case.ranks)]


def rows_of(case: Case) -> list[np.ndarray]:
    """Return the gradients of every rank's rows, in whole numbers."""
    draw = case.generator(case.ranks)
    return [draw.integers(-4, 9, (count, WIDTH)).astype(float) for count in shares_of(case)]


def answer(case: Case, mistake: str = "") -> list[np.ndarray]:
    """Return every rank's answer as the rule makes it, or as a typical mistake does."""
    shares, rows = shares_of(case), rows_of(case)
    batch, everything = sum(shares), np.concatenate(rows)
    gradient = everything.mean(axis=0)
    if mistake == "mean of means":
        gradient = np.mean([part.mean(axis=0) for part in rows], axis=0)
    parts = [part.sum(axis=0) / batch for part in rows]
    s = sum(count * count for count in shares) / batch**2
    if mistake == "equal shares":
        s = 1 / case.ranks
    small = sum(float(part @ part) for part in parts) / (1 if mistake == "not scaled" else s)
    big = float(gradient @ gradient)
    noise = (small - big) / (1 / (s * batch) - 1 / batch)
    return [np.append(gradient, [big - noise / batch, noise])] * case.ranks


def right_at(failure: Failure, entries: slice) -> bool:
    """Return whether these entries are right on every rank of a wrong answer."""
    pairs = zip(failure.answers, failure.expected, strict=True)
    return is_wrong(failure) and all(np.allclose(a[entries], e[entries]) for a, e in pairs)


EXERCISES = [
    Exercise(
        name="10b.gradient_and_noise",
        arguments=lambda case, rank: (shares_of(case), rows_of(case)[rank]),
        expected=answer,
        least=reduced_to_all(lambda case: WIDTH),
        par=Case(4, 7),
        cases=lambda: [case for case in standard_cases() if case.ranks > 1],
        draw=drawing((2, 9), (0, 40)),
        label=lambda case: f"{case.ranks} ranks with {', '.join(map(str, shares_of(case)))} rows",
        limits=("bytes", "messages"),
        hints=hints_of(
            globals(),
            "10b.gradient_and_noise",
            last_two_exchanged=lambda f: f.answers_are([np.append(a[:-2], a[:-3:-1]) for a in answer(f.case)]),
            noise_is_wrong=lambda f: right_at(f, slice(None, -2)) and right_at(f, slice(-1, None)),
            gradient_is_right=lambda f: right_at(f, slice(None, -2)),
            something_is_right=lambda f: right_at(f, slice(0, 0)),
        ),
    )
]
