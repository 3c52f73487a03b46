"""Numbers of lessons, those of now and those that a reader may still have."""

from pathlib import Path

import pytest

from minidist.core.base.errors import UsageError
from minidist.course.lesson import build, names
from minidist.course.lesson.exercise import find
from minidist.course.lesson.grade import exercises_of
from minidist.course.lesson.numbers import MOVED, current, number_of

LESSONS = Path(__file__).resolve().parents[2] / "lessons"


def test_a_number_of_before_finds_its_lesson_and_its_exercises():
    numbers = {number_of(source): source for source in build.sources(LESSONS)}
    for old, new in MOVED.items():
        assert old not in numbers
        assert build.sources(LESSONS, [old]) == [numbers[new]] == build.sources(LESSONS, [new])
        assert exercises_of(old) == exercises_of(new) != []
        for exercise in exercises_of(new):
            slug = exercise.name.partition(".")[2]
            assert find(f"{old}.{slug}") is exercise
    # A lesson that has become several: its old number finds the first.
    for old in ("24.distil", "09b.distil", "09d.distil"):
        assert find(old).name == "09d.distil"
    assert find("29.owners_compute").name == "11c.owners_compute"
    # A lesson of the core has the number that it always had.
    assert not {number for number in numbers if len(number) == 2} & MOVED.keys()
    assert all(current(name) == name for name in names())


def test_an_exercise_of_a_side_room_is_not_one_of_its_lesson():
    assert [exercise.name for exercise in exercises_of("04")] == ["04.ring_all_reduce"]
    assert [exercise.name for exercise in exercises_of("04b")] == ["04b.ordered_reduce_scatter"]
    with pytest.raises(UsageError, match=r"no exercise '06b\.nothing'"):
        find("07.nothing")
