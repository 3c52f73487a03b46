"""Which hint fits a failure: the exercise's own, else one that fits any exercise.

Proved by: tests/lesson/test_exercises.py, tests/lesson/test_bank.py
"""

from collections.abc import Callable, Sequence

from minidist.comm.errors import RankTimeoutError
from minidist.comm.has_run import NotRunError
from minidist.course.lesson.answer_patterns import pattern_of, places_of
from minidist.course.lesson.exercise import Exercise, Failure, Hint, is_wrong
from minidist.course.lesson.hint_file import hints_of
from minidist.course.lesson.runner import ProcessEndedError

FIRST = hints_of({}, "before")
LAST = hints_of(
    {},
    "after",
    endless=lambda f: (
        (f.raised(RankTimeoutError) and "blocked" not in f.message)
        or (f.raised(ProcessEndedError) and "still going on" in f.message)
    ),
    beyond_an_axis=lambda f: "axis" in f.message and "out of bounds" in f.message,
)


def hint_for(exercise: Exercise, failure: Failure, larger: Callable[[], Failure | None] = lambda: None) -> str:
    """Return the text of the first hint that fits, else how the numbers differ, or "".

    larger: runs a larger case, on which one number cannot look like another, and returns its failure. What has not run
    at all has its remedy in its message.
    """
    if failure.raised(NotRunError):
        return ""
    own = [hint for hint in exercise.hints if hint.when is not is_wrong]
    found = _first((*FIRST, *own), failure) or pattern_of(failure, exercise) or _first(LAST, failure)
    if found or failure.kind != "wrong":
        return found
    other = larger()
    found = pattern_of(other, exercise) if other is not None else ""
    if other is not None and found:
        return f"on {exercise.describe(other.case)}: {found}"
    return _first(exercise.hints, failure) or places_of(failure)


def _first(hints: Sequence[Hint], failure: Failure) -> str:
    return next((hint.text for hint in hints if hint.fits(failure)), "")
