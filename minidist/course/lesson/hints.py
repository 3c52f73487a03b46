"""Which hint fits a failure: the exercise's own, else one that fits any exercise.

Proved by: tests/lesson/test_exercises.py, tests/lesson/test_bank.py
"""

from collections.abc import Callable, Sequence

from minidist.comm.has_run import NotRunError
from minidist.core.base.errors import (
    BufferReuseError,
    DeadlockError,
    MismatchError,
    RankTimeoutError,
    UnmatchedMessageError,
    UnwaitedRequestError,
    UsageError,
)
from minidist.course.lesson.answer_patterns import pattern_of, places_of
from minidist.course.lesson.answer_process import EndlessError
from minidist.course.lesson.exercise import Exercise, Failure, Hint, is_wrong
from minidist.course.lesson.library_calls import LibraryCallError
from minidist.course.lesson.one_rank import ForbiddenCallError, ProgramExitError
from minidist.course.lesson.runner import ProcessEndedError

# What these say is sure, whatever the exercise.
FIRST = (
    Hint(lambda f: f.raised(NotImplementedError), "this is the stub; write the function, then run this cell again"),
    Hint(lambda f: f.raised(NameError) and "'____'" in f.message, "put your code in the place of each ____"),
    Hint(
        lambda f: f.raised(LibraryCallError),
        "write it yourself here; outside of the exercise the library's function is the one to use",
    ),
    Hint(lambda f: f.raised(ProgramExitError), "return from the function instead of ending the program"),
    Hint(
        lambda f: f.raised(MismatchError) and "dtype mismatch" in f.message,
        "the two sides of a message have different dtypes: np.empty_like(array) has that of the array",
    ),
    Hint(
        lambda f: f.raised(ProcessEndedError) and "function ended" in f.message,
        "os._exit, os.kill, or a crash in compiled code, ends the process; return from the function instead",
    ),
)

# What these say fits when the exercise has nothing better.
LAST = (
    Hint(lambda f: "returned None" in f.message, "does every path of your function end in a return?"),
    Hint(
        lambda f: f.raised(RankTimeoutError) or (f.raised(ProcessEndedError) and "still going on" in f.message),
        "a loop does not end: does its condition change?",
    ),
    Hint(
        lambda f: f.raised(MemoryError),
        "the answer needs more memory than it may take (`--memory` of minidist grade): does a list grow without end?",
    ),
    Hint(lambda f: f.raised(EndlessError), "a loop sends again and again: count its steps for 2 ranks on paper"),
    Hint(
        lambda f: f.raised(UsageError) and "names rank" in f.message,
        "ranks are 0 to n-1: a ring closes with % n, and at the ends of a chain a neighbour is missing",
    ),
    Hint(lambda f: f.raised(BufferReuseError), "give each message a buffer of its own, such as np.empty_like(array)"),
    Hint(
        lambda f: f.raised(MismatchError),
        "both sides of a message have one dtype and one size: print the shapes on both ranks",
    ),
    Hint(
        lambda f: "messages are arrays" in f.message,
        "a message is an array: np.array([value]) makes one of a number, and the receiver fills one of the same size",
    ),
    Hint(lambda f: f.raised(UnmatchedMessageError), "each send needs one receive: count both for 2 ranks on paper"),
    Hint(lambda f: f.raised(UnwaitedRequestError), "isend and irecv only start: wait for every request"),
    Hint(lambda f: "the answer is" in f.message, "the answer has another form than the exercise asks for"),
    Hint(lambda f: f.raised(ForbiddenCallError), "write it with the other methods of comm"),
    Hint(
        lambda f: f.raised(DeadlockError) and "circle" in f.message,
        "follow the circle in the report: which of these ranks could receive first, or do both at once?",
    ),
    Hint(
        lambda f: f.raised(DeadlockError),
        "a rank waits for one that has ended or does something else: each send needs a receive, each receive a send,"
        " and every rank takes part in a collective; is the call inside a condition that only some ranks meet?",
    ),
    Hint(
        lambda f: (
            f.raised(ValueError)
            and any(word in f.message for word in ("shape", "broadcast", "concatenate", "mismatch"))
        ),
        "two arrays do not fit together: print the shapes on the case above, which may have an empty array",
    ),
    Hint(
        lambda f: f.raised(IndexError, KeyError),
        "an index or a key is not there: write down its first and its last value on the case above",
    ),
    Hint(
        lambda f: "axis" in f.message and "out of bounds" in f.message,
        "an axis is not there: a matrix has the axes 0, down the rows, and 1, along a row",
    ),
    Hint(
        lambda f: f.raised(TypeError, AttributeError),
        "a value has another type than this operation takes: print it, and see which path leaves it unset",
    ),
    Hint(lambda f: f.raised(ZeroDivisionError), "something is divided by 0: which number is 0 on the case above?"),
    Hint(
        lambda f: f.kind in ("mpi", "shared", "few"),
        "ranks share nothing but messages; a list, a global or a default argument that every rank sees exists only "
        "where all ranks live in one process",
    ),
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
