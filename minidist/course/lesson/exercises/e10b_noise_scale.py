"""Lesson 10b: the gradient of uneven shares and its noise, from one all-reduce.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.course.lesson.exercise import (
    Case,
    Exercise,
    Failure,
    Hint,
    drawing,
    is_wrong,
    reduced_to_all,
    standard_cases,
)

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
        hints=(
            Hint(
                lambda f: "got shape" in f.message,
                "return one array: the gradient, then its square without noise, then the noise",
            ),
            Hint(
                lambda f: f.answers_are([np.append(a[:-2], a[:-3:-1]) for a in answer(f.case)]),
                "the last two numbers are exchanged: the squared gradient first, then the noise",
            ),
            Hint(
                lambda f: f.answers_are(answer(f.case, "mean of means")),
                "this is the mean of the ranks' means, which counts the rows of a small share more: divide each rank's"
                " sum by the rows of the whole batch, and add",
            ),
            Hint(
                lambda f: f.answers_are(answer(f.case, "not scaled")),
                "the squares are those of shares of a gradient: divide their sum by s = sum b_r^2 / B^2",
            ),
            Hint(
                lambda f: f.answers_are(answer(f.case, "equal shares")),
                "right for equal shares, of which s is 1/n; here s = sum b_r^2 / B^2",
            ),
            Hint(
                lambda f: right_at(f, slice(None, -2)) and right_at(f, slice(-1, None)),
                "the square without noise alone is wrong: it is that of the gradient minus noise / B",
            ),
            Hint(
                lambda f: right_at(f, slice(None, -2)),
                "the gradient is right and the noise is not: (small - big) / (1 / (s B) - 1 / B), with small the sum of"
                " squares over s and big the square of the gradient",
            ),
            Hint(
                lambda f: is_wrong(f) and right_at(f, slice(0, 0)),
                "the gradient is wrong: divide each rank's sum of rows by the rows of the whole batch, and add",
            ),
            Hint(
                lambda f: f.kind == "limit" and f.metric == "messages",
                "right, but with too many messages: append the square to the gradient, and all-reduce both at once",
            ),
            Hint(
                lambda f: f.kind == "limit",
                "right, but too many bytes: the sum of a rank's rows and one square are enough, not the rows",
            ),
        ),
    )
]
