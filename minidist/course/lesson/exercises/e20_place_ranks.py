"""Lesson 20: ranks of a mesh onto nodes, so that the axis with the most bytes stays inside."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing


def problem(case: Case) -> tuple[tuple[int, ...], list[float], int]:
    """Return a mesh of powers of two, distinct bytes for each axis, and the size of a node."""
    draw = case.generator()
    shape = tuple(int(n) for n in 2 ** draw.integers(0, 3, 3))
    ranks = int(np.prod(shape))
    sizes = [n for n in (1, 2, 4, 8, 16) if ranks % n == 0]
    return shape, draw.permutation([1.0, 10.0, 100.0]).tolist(), int(draw.choice(sizes))


def crossing(shape: Sequence[int], traffic: Sequence[float], nodes: Sequence[int]) -> float:
    """Return the bytes between nodes of all pairs of ranks that differ on one axis only."""
    total = 0.0
    places = list(np.ndindex(*shape))
    for (i, a), (j, b) in itertools.combinations(enumerate(places), 2):
        different = [axis for axis in range(len(shape)) if a[axis] != b[axis]]
        if len(different) == 1 and nodes[i] != nodes[j]:
            total += traffic[different[0]]
    return total


def numbered(shape: Sequence[int], order: Sequence[int], node_size: int) -> list[int]:
    """Return the node of each rank when nodes are filled with the axes in this order, the last one the fastest."""
    ranks = np.arange(np.prod(shape)).reshape(shape)
    nodes = np.empty(ranks.size, int)
    nodes[ranks.transpose(order).reshape(-1)] = np.arange(ranks.size) // node_size
    result: list[int] = nodes.tolist()
    return result


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    shape, traffic, node_size = problem(case)
    ranks = int(np.prod(shape))
    nodes = list(answers[0]) if isinstance(answers[0], list | tuple | np.ndarray) else []
    if len(nodes) != ranks:
        return f"return one node for each of the {ranks} ranks of the mesh {shape}"
    counts = Counter(int(node) for node in nodes)
    if counts != Counter(dict.fromkeys(range(ranks // node_size), node_size)):
        return (
            f"mesh {shape}: the nodes hold {dict(sorted(counts.items()))} ranks; each of 0 to {ranks // node_size - 1}"
            f" must hold {node_size}"
        )
    orders = itertools.permutations(range(len(shape)))
    best = min(crossing(shape, traffic, numbered(shape, order, node_size)) for order in orders)
    mine = crossing(shape, traffic, nodes)
    if mine > best:
        return (
            f"mesh {shape} with traffic {traffic} and nodes of {node_size}: {mine:g} B between nodes, {best:g} are"
            " enough"
        )
    return ""


def has_the_fewest_bytes_inside(failure: Failure) -> bool:
    shape, traffic, node_size = problem(failure.case)
    opposite = numbered(shape, sorted(range(len(shape)), key=lambda axis: -traffic[axis]), node_size)
    return "between nodes" in failure.message and list(failure.answers[0]) == opposite


EXERCISES = [
    Exercise(
        name="20.place_ranks",
        arguments=lambda case, rank: problem(case),
        check_answers=check_answers,
        cases=lambda: [Case(1, size) for size in range(40)],
        draw=drawing((1, 1), (40, 1000)),
        par=Case(1, 8),
        label=lambda case: "mesh {}, traffic {}, nodes of {}".format(*problem(case)),
        communicates=False,
    )
]
