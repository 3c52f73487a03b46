"""Lesson 17: 1F1B for every number of stages and micro-batches.

Proved by: tests/lesson/test_exercises.py
"""

from minidist.lesson.exercise import Hint
from minidist.lesson.exercises.e16_gpipe import exercise, says


def one_f_one_b(stages: int, microbatches: int) -> list[list[str]]:
    """On stage s run p-1-s forwards ahead (or m, if less), then a forward and a backward in turn, then the rest."""
    lists = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        order = [f"F{i}" for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                order.append(f"F{ahead + i}")
            order.append(f"B{i}")
        lists.append(order)
    return lists


EXERCISES = [
    exercise(
        "17.one_f_one_b",
        one_f_one_b,
        "1f1b",
        True,
        (
            Hint(
                says("are enough"),
                "a stage runs too far ahead: stage s needs p-1-s forwards before its first pair of F and B, the last"
                " stage none",
            ),
            Hint(
                says("it takes"),
                "some stage has too little in flight and waits: stage s starts with p-1-s forwards, so that the first"
                " gradient comes back just when they are done",
            ),
        ),
    )
]
