"""Lesson 10: the three batch sizes of a DeepSpeed file, of which one or two may be missing.

Source: DeepSpeed, `_set_batch_related_parameters` and `_batch_assertion` of runtime/config.py.
Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.course.lesson.exercise import Case, Exercise, Failure, drawing
from minidist.course.lesson.hint_file import hints_of

Batch = tuple[int, int, int]
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def file_of(case: Case) -> tuple[int, int | None, int | None, int | None]:
    """Return the number of ranks, and the file's three numbers; each may be missing, and they may not fit together."""
    draw = case.generator()
    ranks, micro, steps = (int(draw.integers(1, top)) for top in (5, 7, 5))
    train = micro * steps * ranks + (int(draw.integers(1, 4)) if draw.random() < 0.25 else 0)
    missing = draw.random(3) < 0.4
    values = [None if gone else value for value, gone in zip((train, micro, steps), missing, strict=True)]
    return ranks, values[0], values[1], values[2]


def determined(ranks: int, train: int | None, micro: int | None, steps: int | None) -> Batch | None:
    """Return the three numbers that fit a file and the rule train = micro x steps x ranks, found by trying; or None."""
    if train is None and micro is None:
        return None
    if steps is None and (train is None or micro is None):
        steps = 1
    rows, counts = (range(1, 100) if number is None else [number] for number in (micro, steps))
    batches = ((a * b * ranks, a, b) for a in rows for b in counts)
    return next((batch for batch in batches if train in (None, batch[0])), None)


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    wanted, got = determined(*file_of(case)), answers[0]
    if got is not None:
        got = tuple(int(number) for number in got)
    return "" if got == wanted else f"got {got}, expected {wanted}"


def says_none(failure: Failure) -> bool:
    return failure.message.startswith("got None")


def should_be_none(failure: Failure) -> bool:
    return "expected None" in failure.message


def accumulates(failure: Failure) -> bool:
    wanted, got = determined(*file_of(failure.case)), failure.answers[0]
    return wanted is not None and tuple(got)[2] != wanted[2]


EXERCISES = [
    Exercise(
        name="10.batch_sizes",
        arguments=lambda case, rank: file_of(case),
        expected=lambda case: [determined(*file_of(case))],
        check_answers=check_answers,
        cases=lambda: [Case(1, size) for size in range(60)],
        draw=drawing((1, 1), (60, 1000)),
        par=Case(1, 8),
        label=lambda case: "{} ranks; train, micro, steps = {}, {}, {}".format(*file_of(case)),
        communicates=False,
        hints=hints_of(
            globals(),
            "10.batch_sizes",
            every_size=lambda f: sorted(f.answers[0]) == sorted(determined(*file_of(f.case)) or ()),
        ),
    )
]
