"""Lesson 20c: layers that differ, cut into stages so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise
from minidist.pipeline.partition import by_slowest


def times_of(case: Case) -> list[float]:
    """Return times of very different length: an embedding, a head, blocks."""
    return [float(t) for t in case.generator().integers(1, 20, case.size)]


def slowest(times: Sequence[float], sizes: Sequence[int]) -> float:
    cuts = np.cumsum([0, *sizes])
    return max(sum(times[a:b]) for a, b in pairwise(cuts))


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    times, stages = times_of(case), case.seed
    if not isinstance(answers[0], list | tuple | np.ndarray):
        return f"return a list with the number of layers of each of the {stages} stages"
    sizes = [int(n) for n in answers[0]]
    if len(sizes) != stages:
        return f"{len(sizes)} stages instead of {stages}"
    if sum(sizes) != len(times):
        return f"the stages hold {sum(sizes)} layers together, the model has {len(times)}"
    if min(sizes) < 1:
        return f"a stage of {sizes} is without a layer"
    shortest = [stage.last - stage.first + 1 for stage in by_slowest(times, stages)]
    mine, best = slowest(times, sizes), slowest(times, shortest)
    if mine > best:
        return (
            f"layers {[round(t) for t in times]} on {stages} stages as {sizes}: the slowest takes {mine:g}, {best:g}"
            " is possible"
        )
    return ""


def draw_split(draw: np.random.Generator) -> Case:
    """Return a case of up to 14 layers, with a stage for each at most."""
    layers = int(draw.integers(1, 15))
    return Case(1, layers, int(draw.integers(1, layers + 1)))


EXERCISES = [
    Exercise(
        name="20c.min_max_split",
        arguments=lambda case, rank: (times_of(case), case.seed),
        check_answers=check_answers,
        cases=lambda: [
            Case(1, layers, stages) for layers in (1, 2, 3, 5, 8, 12) for stages in (1, 2, 3, 4, 8) if stages <= layers
        ],
        draw=draw_split,
        par=Case(1, 8, 4),
        label=lambda case: f"{case.size} layer{'s' * (case.size != 1)}, {case.seed} stage{'s' * (case.seed != 1)}",
        communicates=False,
        written_by_hand=("minidist.pipeline.partition",),
        for_hints={
            "ends_not_sizes": lambda f: len(f.answers[0]) > 1 and f.answers[0][-1] == f.case.size != sum(f.answers[0])
        },
    )
]
