"""Lesson 10: where to cut a network into segments under a budget, and a segment whose dropout replays."""

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing

# Picking segments -----------------------------------------------------------------------------------------------------


def peak_bytes(saved: Sequence[int], segments: Sequence[int], boundary: int) -> int:
    """Return the peak: one input for each segment, and everything inside the largest one."""
    ends = np.cumsum(segments)
    return boundary * len(segments) + max(sum(saved[end - n : end]) for n, end in zip(segments, ends, strict=True))


def job(case: Case) -> tuple[list[int], int, int]:
    """Return the bytes that each layer saves, those of a segment's input, and a budget (seed 4: impossible to meet)."""
    draw = case.generator()
    saved = [int(n) for n in draw.integers(1, 9, case.size)]
    boundary = int(draw.integers(1, 4))
    best = min(peak_bytes(saved, cut, boundary) for cut in cuts(case.size))
    whole = sum(saved) + boundary
    return saved, boundary, best - 1 if case.seed == 4 else int(draw.integers(best, whole + 1))


def cuts(layers: int) -> list[list[int]]:
    """Return every way to cut `layers` layers into segments, those with the fewest segments first."""
    result = []
    for count in range(layers):
        for places in combinations(range(1, layers), count):
            result.append([b - a for a, b in pairwise((0, *places, layers))])
    return result


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    saved, boundary, budget = job(case)
    (segments,) = answers
    fits = [cut for cut in cuts(case.size) if peak_bytes(saved, cut, boundary) <= budget]
    given = f"layers save {saved} B, a segment's input has {boundary} B, the budget is {budget} B"
    if segments is None or not list(segments):
        return f"{given}: you found no cut, and {fits[0]} fits" if fits else "" if segments is None else "return None"
    segments = [int(n) for n in segments]
    if sum(segments) != case.size or min(segments) < 1:
        return f"{given}: {segments} are not segments of {case.size} layers"
    peak = peak_bytes(saved, segments, boundary)
    if peak > budget:
        return f"{given}: {segments} needs {peak} B" + ("" if fits else "; no cut fits, so return None")
    if len(segments) > len(fits[0]):
        return f"{given}: {segments} fits, and {fits[0]} has fewer segments"
    return ""


def inputs_forgotten(failure: Failure) -> bool:
    """Return whether the answer would fit if the segments' inputs were free."""
    if " needs " not in failure.message or "no cut fits" in failure.message:
        return False
    saved, _, budget = job(failure.case)
    return peak_bytes(saved, failure.answers[0], 0) <= budget


# Replaying dropout ----------------------------------------------------------------------------------------------------


class Segment:
    """y = 3 x where a mask drawn from `rng` is 1, else 0. Each call draws once."""

    def forward(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return 3 * x * rng.integers(0, 2, x.shape)

    def gradient(self, x: np.ndarray, g: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the input's gradient from the output's. It runs forward again, so it draws again."""
        return 3 * g * rng.integers(0, 2, x.shape)


def segments_of(case: Case, rank: int) -> tuple[Any, ...]:
    draw = case.generator()
    return Segment(), draw.integers(1, 9, 8 * case.size) * 1.0, np.random.default_rng([case.seed, 7])


def run_two(arguments: tuple[Any, ...], returned: Any) -> Any:
    """Return the first segment's output, another one, two gradients, and what the generator draws at the end."""
    if returned is None:
        return None
    segment, _, rng = arguments
    y, backward = returned
    other = segment.forward(y, rng)
    g = backward(np.ones_like(y))
    again = backward(np.full_like(y, 2.0))
    return y, other, g, again, rng.integers(0, 1000, 4)


def without_recomputation(case: Case) -> list[Any]:
    segment, x, rng = segments_of(case, 0)
    mask = copy.deepcopy(rng).integers(0, 2, x.shape)
    y = segment.forward(x, rng)
    other = segment.forward(y, rng)
    return [(y, other, 3.0 * mask, 6.0 * mask, rng.integers(0, 1000, 4))]


EXERCISES = [
    Exercise(
        name="10.pick_segments",
        arguments=lambda case, rank: job(case),
        check_answers=check_answers,
        cases=lambda: [Case(1, size, seed) for seeds in (range(4), (4,)) for size in (1, 2, 3, 5, 8) for seed in seeds],
        draw=drawing((1, 1), (1, 9)),
        par=Case(1, 5),
        unit="layer",
        communicates=False,
    ),
    Exercise(
        name="10.recompute",
        arguments=segments_of,
        expected=without_recomputation,
        answer=run_two,
        cases=lambda: [Case(1, size, seed) for size in (1, 2, 5) for seed in range(3)],
        draw=drawing((1, 1), (1, 6)),
        par=Case(1, 2),
        communicates=False,
        label=lambda case: f"{8 * case.size} elements, seed {case.seed}",
        for_hints={"twice_the_gradient": lambda f: np.allclose(f.answers[0][2], 2 * f.expected[0][2])},
    ),
]
