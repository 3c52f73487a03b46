"""Lesson 05b: the order of a ring whose ranks are on several nodes."""

from collections.abc import Sequence
from typing import Any

from minidist.course.lesson.exercise import Case, Exercise, drawing


def nodes_of(case: Case) -> list[int]:
    """Return the node of each rank; nodes may have any number of ranks."""
    draw = case.generator()
    return [int(node) for node in draw.integers(0, max(1, case.size // 3 + 1), case.size + 1)]


def crossings(order: Sequence[int], nodes: Sequence[int]) -> int:
    """Return how many of the ring's links join different nodes."""
    return sum(nodes[a] != nodes[b] for a, b in zip(order, [*order[1:], order[0]], strict=True))


def fewest_crossings(nodes: Sequence[int]) -> int:
    """Return how many links leave a node when the ring enters each node once: one per node, or none in a single one."""
    count = len(set(nodes))
    return count if count > 1 else 0


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    nodes = nodes_of(case)
    order = [int(rank) for rank in answers[0]]
    if sorted(order) != list(range(len(nodes))):
        return f"{order} is not an order of the ranks 0 to {len(nodes) - 1}, each once"
    mine, best = crossings(order, nodes), fewest_crossings(nodes)
    if mine > best:
        return f"nodes {nodes}: {mine} links of the ring {order} cross between nodes, {best} are enough"
    return ""


EXERCISES = [
    Exercise(
        name="05b.ring_order",
        arguments=lambda case, rank: (nodes_of(case),),
        check_answers=check_answers,
        cases=lambda: [Case(1, size, seed) for size in range(12) for seed in range(3)],
        draw=drawing((1, 1), (4, 30)),
        par=Case(1, 8),
        label=lambda case: f"the ranks' nodes are {nodes_of(case)}",
        communicates=False,
        for_hints={
            "in_the_order_of_ranks": lambda f: (
                [int(rank) for rank in f.answers[0]] == list(range(len(nodes_of(f.case))))
            )
        },
    )
]
