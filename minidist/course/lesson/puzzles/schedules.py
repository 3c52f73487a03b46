"""The row of schedules: s01 to s20. An answer is the list of actions of each stage, which is validated and timed.

F takes 1 µs and B 2 µs, or I and W 1 µs each; messages take no time. A micro-batch holds 1,000 B on a stage from its F
to its B (or W). The picture is that of the plan, as far as it runs.
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.traces import SpanEvent, Trace
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case
from minidist.course.lesson.exercises.e16_gpipe import describe, in_the_readers_words, plan_of
from minidist.course.lesson.hint_file import hints_of
from minidist.course.lesson.puzzles import Item, own_exercises, puzzles_of
from minidist.pipeline.plan_methods import show
from minidist.pipeline.schedules import from_cells, get_schedule
from minidist.pipeline.simulate import Dependencies, simulate
from minidist.pipeline.timing import time_plan

MICROSECOND, ACTIVATION = 1e-6, 1000
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Given(tuple[Any, ...]):
    """The arguments of a function, with the communicator of the run that it is called in."""

    comm: Comm


def setup(comm: Comm, *arguments: Any) -> tuple[Any, ...]:
    given = Given(arguments)
    given.comm = comm
    return given


def size_of(case: Case, rank: int) -> tuple[int, int]:
    """Return the number of stages and of micro-batches."""
    return case.size, case.seed


def timed(arguments: tuple[Any, ...], returned: Any) -> Any:
    """Return the lists; their time and their peak become those of the run, where they are a plan."""
    stages, microbatches = arguments[:2]
    try:
        timing = time_plan(plan_of(returned, Case(1, stages, microbatches)))
    except UsageError:
        return returned
    comm = arguments.comm  # type: ignore[attr-defined]
    comm.compute(seconds=MICROSECOND * timing.makespan, name="plan")
    comm.trace.memory.append((0.0, {"activation": ACTIVATION * max(timing.peak)}))
    return returned


def valid(case: Case, answers: Sequence[Any]) -> str:
    """Return a sentence where the lists are no plan that can run."""
    try:
        plan_of(answers[0], case)
    except UsageError as error:
        return f"not a plan: {in_the_readers_words(error)}"
    return ""


def drawn(case: Case, answer: Any) -> list[Trace]:
    """Return the lists as a recorded run: what runs until stages wait for ever."""
    plan = from_cells([[f"{stage}{action}" for action in row] for stage, row in enumerate(answer)], "yours")
    run = simulate(
        plan.orders, Dependencies(plan).needs, lambda item: MICROSECOND * SECONDS[show(item).strip("0123456789")]
    )
    return [
        Trace(rank, plan.ranks, spans=[SpanEvent(rank, "main", show(item), start, end) for item, start, end in row])
        for rank, row in enumerate(run.spans)
    ]


COMMON = hints_of({}, "schedules")
NOTE = (
    "F takes 1 µs and B 2 µs, or I and W 1 µs each. A micro-batch holds 1,000 B on a stage from its F to its B, or W;"
    " the memory is that of the fullest stage."
)


def plan(item: Item) -> dict[str, Any]:
    """Return the settings of the puzzle of a plan."""
    return {
        "picture": drawn,
        "setup": setup,
        "arguments": size_of,
        "answer": timed,
        "check_answers": valid,
        "label": describe,
        "communicates": False,
        "limits": ("time", "memory"),
        "written_by_hand": ("minidist.core.pipeline.schedules.get_schedule",),
        "note": NOTE,
        "hints": (*hints_of({}, "plans"), *COMMON),
    }


def number(item: Item) -> dict[str, Any]:
    """Return the settings of the puzzle of a number about a schedule: its right value is simulated, its plan drawn."""
    schedule, value = item["schedule"], item["value"]

    def picture(case: Case, given: Any) -> list[Trace]:
        orders = get_schedule(schedule).plan(case.size, case.seed).orders
        return drawn(case, [[show(action).lstrip("0123456789") for action in order] for order in orders])

    def expected(case: Case) -> list[Any]:
        if value == "enough":
            return [enough(case.size)]
        return [getattr(time_plan(get_schedule(schedule).plan(case.size, case.seed)), value)]

    return {"picture": picture, "arguments": size_of, "expected": expected, "label": describe, "communicates": False}


def enough(stages: int) -> int:
    """Return the least number of micro-batches with which GPipe's bubble is at most a quarter of its work."""
    return next(m for m in range(1, 1000) if time_plan(get_schedule("gpipe").plan(stages, m)).bubble_of_ideal <= 0.25)


def passes(case: Case, answer: Any) -> list[Trace]:
    """Return the four passes of one micro-batch on each rank as a recorded run."""
    names = ("F0", "F1", "I1", "I0")
    return [
        Trace(
            rank,
            case.size,
            spans=[SpanEvent(rank, "main", *each) for each in zip(names, row, [t + 1 for t in row], strict=True)],
        )
        for rank, row in enumerate(answer)
    ]


PUZZLES = puzzles_of("schedules", globals(), {"plan": plan, "number": number})
EXERCISES = own_exercises(PUZZLES)
