"""Lesson 10b: the gradient of all ranks' rows and its noise, from one all-reduce."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing, is_wrong, reduced_to_all, standard_cases

WIDTH = 3  # numbers of a row's gradient


def rows_of(case: Case) -> list[np.ndarray]:
    """Return the gradients of every rank's rows, as many on each rank, in whole numbers."""
    draw = case.generator(case.ranks)
    return [draw.integers(-4, 9, (1 + case.size, WIDTH)).astype(float) for _ in range(case.ranks)]


def answer(case: Case, mistake: str = "") -> list[np.ndarray]:
    """Return every rank's answer as the rule makes it, or as a typical mistake does."""
    means = [rows.mean(axis=0) for rows in rows_of(case)]
    gradient = np.mean(means, axis=0)
    few, many = 1 + case.size, case.ranks * (1 + case.size)
    small, big = float(np.mean([mean @ mean for mean in means])), float(gradient @ gradient)
    small *= {"sum": case.ranks, "part": case.ranks**-2}.get(mistake, 1)
    noise = (small - big) / (1 / few - 1 / many)
    return [np.append(gradient, [big - noise / many, noise])] * case.ranks


def right_at(failure: Failure, entries: slice) -> bool:
    """Return whether these entries are right on every rank of a wrong answer."""
    pairs = zip(failure.answers, failure.expected, strict=True)
    return is_wrong(failure) and all(np.allclose(a[entries], e[entries]) for a, e in pairs)


EXERCISES = [
    Exercise(
        name="10b.gradient_and_noise",
        arguments=lambda case, rank: (rows_of(case)[rank],),
        expected=answer,
        least=reduced_to_all(lambda case: WIDTH),
        par=Case(4, 7),
        cases=lambda: [case for case in standard_cases() if case.ranks > 1],
        draw=drawing((2, 9), (0, 40)),
        label=lambda case: f"{case.ranks} ranks with {1 + case.size} row{'s' * (case.size > 0)} each",
        limits=("bytes", "messages"),
        for_hints={
            "last_two_exchanged": lambda f: f.answers_are([np.append(a[:-2], a[:-3:-1]) for a in answer(f.case)]),
            "noise_is_wrong": lambda f: right_at(f, slice(None, -2)) and right_at(f, slice(-1, None)),
            "gradient_is_right": lambda f: right_at(f, slice(None, -2)),
            "something_is_right": lambda f: right_at(f, slice(0, 0)),
        },
    )
]
