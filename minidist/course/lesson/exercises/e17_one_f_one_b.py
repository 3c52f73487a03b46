"""Lesson 17: 1F1B for every number of stages and micro-batches.

Proved by: tests/lesson/test_exercises.py
"""

from minidist.course.lesson.exercise import Hint, says
from minidist.course.lesson.exercises.e16_gpipe import exercise

EXERCISES = [
    exercise(
        "17.one_f_one_b",
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
