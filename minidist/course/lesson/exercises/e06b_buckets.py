"""Lesson 06b: a bucketed reducer, with parameters that a rank uses twice, or not at all."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist.comm.errors import UnwaitedRequestError
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, Work
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, standard_cases, summed

SECONDS = 2e-6  # seconds that backward takes for one contribution
LATE = Case(2, 4, 62)  # here a reducer that starts after backward takes a quarter longer, with no parameter used twice


class Sum:
    """The sum of a copy of one bucket while it runs; `wait()` writes it over the gradient."""

    def __init__(self, place: np.ndarray, work: Work) -> None:
        self.place, self.work = place, work

    def wait(self) -> None:
        self.place[:] = self.work.wait()


class Step:
    """One rank's backward pass: the gradient that it fills, and what the exercise's function may call."""

    def __init__(
        self, comm: Comm, sizes: list[int], buckets: list[list[int]], contributions: list[tuple[int, np.ndarray]]
    ) -> None:
        self.comm, self.sizes, self.buckets, self.contributions = comm, sizes, buckets, contributions
        self.ends = np.cumsum(self.sizes)
        self.gradient = np.zeros(sum(self.sizes))

    def slice(self, first: int, last: int) -> np.ndarray:
        return self.gradient[self.ends[first] - self.sizes[first] : self.ends[last]]

    def backward(self) -> Iterator[int]:
        for parameter, values in self.contributions:
            self.comm.compute(seconds=SECONDS, name="backward")
            self.slice(parameter, parameter)[:] += values
            yield parameter

    def launch(self, bucket: int) -> Sum:
        place = self.slice(min(self.buckets[bucket]), max(self.buckets[bucket]))
        work: Any = all_reduce(self.comm, place.copy(), async_op=True)
        return Sum(place, work)


def parameters(case: Case) -> tuple[list[int], list[list[int]]]:
    """Return the elements of each parameter, and the buckets, cut from the end, as lists of parameters."""
    draw = case.generator()
    sizes = [int(size) for size in draw.integers(1, 6, case.size)]
    buckets: list[list[int]] = []
    for parameter in reversed(range(case.size)):
        if not buckets or draw.random() < 0.4:
            buckets.append([])
        buckets[-1].append(parameter)
    return sizes, buckets


def use_counts(case: Case, rank: int) -> list[int]:
    """Return how often each parameter contributes on this rank: mostly once, sometimes twice or never."""
    return [int(count) for count in case.generator(rank, 1).choice([0, 1, 1, 1, 2], case.size)]


def contributions(case: Case, rank: int) -> list[tuple[int, np.ndarray]]:
    """Return (parameter, values) in the order of this rank's backward: roughly from the last one to the first; the
    second contribution of a parameter comes some time after the first.
    """
    draw = case.generator(rank, 2)
    sizes, _ = parameters(case)
    places = [
        (-parameter + draw.uniform(0, 1.5) + 2.5 * again, parameter)
        for parameter, count in enumerate(use_counts(case, rank))
        for again in range(count)
    ]
    return [(parameter, draw.integers(1, 100, sizes[parameter]) * 1.0) for _, parameter in sorted(places)]


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    return *parameters(case), use_counts(case, rank), contributions(case, rank)


def setup(comm: Comm, sizes: Any, buckets: Any, uses: Any, contributions: Any) -> tuple[Any, ...]:
    step = Step(comm, sizes, buckets, contributions)
    return step.backward(), uses, buckets, step.launch


def answer(arguments: tuple[Any, ...], returned: Any) -> np.ndarray:
    """Return the gradient as the function left it."""
    gradient: np.ndarray = arguments[3].__self__.gradient
    return gradient


def least(case: Case) -> Least:
    """Return the sum over the parameters; some ranks have used each of them."""
    uses = np.array([use_counts(case, rank) for rank in range(case.ranks)]).reshape(case.ranks, case.size)
    each = [
        summed(int(users), case.ranks, size)
        for users, size in zip((uses > 0).sum(axis=0), parameters(case)[0], strict=True)
        if users
    ]
    return Least(max((one.messages for one in each), default=0), sum(one.nbytes for one in each))


def local(case: Case, rank: int, uses: int | None = None) -> np.ndarray:
    """Return the rank's gradient; `uses` limits how many contributions of each parameter count."""
    sizes, _ = parameters(case)
    parts = [np.zeros(size) for size in sizes]
    seen = [0] * case.size
    for parameter, values in contributions(case, rank):
        if uses is None or seen[parameter] < uses:
            parts[parameter] += values
        seen[parameter] += 1
    return np.concatenate([*parts, np.zeros(0)])


def total(case: Case) -> list[np.ndarray]:
    return [np.sum([local(case, rank) for rank in range(case.ranks)], axis=0)] * case.ranks


def unreduced(failure: Failure) -> bool:
    """Return whether some rank holds its own gradient where the sum should be."""
    if failure.kind != "wrong":
        return False
    alone = [local(failure.case, rank) for rank in range(failure.case.ranks)]
    both = zip(failure.answers, alone, failure.expected, strict=True)
    return any(np.any((got == own) & (own != wanted)) for got, own, wanted in both)


EXERCISES = [
    Exercise(
        name="06b.bucketed_reducer",
        arguments=arguments,
        setup=setup,
        expected=total,
        answer=answer,
        least=least,
        cases=lambda: [LATE, *standard_cases()],
        par=Case(4, 16),
        unit="parameter",
        limits=("bytes", "time"),
        for_hints={
            "reused": lambda f: any(2 in use_counts(f.case, rank) for rank in range(f.case.ranks)),
            "never_waited_for": lambda f: (
                f.raised(UnwaitedRequestError) or (f.kind == "wrong" and "got []" in f.message)
            ),
        },
    )
]
