"""The row of schedules: s01 to s20. An answer is the list of actions of each stage, which is validated and timed.

F takes 1 µs and B 2 µs, or I and W 1 µs each; messages take no time. A micro-batch holds 1,000 B on a stage from its F
to its B (or W). The picture is that of the plan, as far as it runs.

Proved by: tests/lesson/test_puzzles.py
"""

from collections.abc import Callable, Sequence
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.core.base.trace import SpanEvent, Trace
from minidist.core.comm import Comm
from minidist.core.pipeline.plan import show
from minidist.course.lesson.exercise import Case, Hint
from minidist.course.lesson.exercises import e16_gpipe, e17_one_f_one_b, e19_zero_bubble, e19b_building_block
from minidist.course.lesson.exercises.e16_gpipe import describe, in_the_readers_words, plan_of
from minidist.course.lesson.hint_file import hints_of
from minidist.course.lesson.puzzles import Puzzle, above, of_lesson, puzzle, raises, says
from minidist.pipeline.schedules import from_cells, get_schedule
from minidist.pipeline.simulate import Dependencies, simulate
from minidist.pipeline.timing import Timing, time_plan

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


def plan_puzzle(text: str, sizes: Sequence[tuple[int, int]], *hints: Hint) -> Puzzle:
    """Return the puzzle of a plan; sizes: stages and micro-batches of each case."""
    return puzzle(
        text,
        [Case(1, p, m) for p, m in sizes],
        *(*hints, *OF_PLANS, *COMMON),
        note=(
            "F takes 1 µs and B 2 µs, or I and W 1 µs each. A micro-batch holds 1,000 B on a stage from its F to its B,"
            " or W; the memory is that of the fullest stage."
        ),
        picture=drawn,
        setup=setup,
        arguments=size_of,
        expected=lambda case: (),
        answer=timed,
        check_answers=valid,
        label=describe,
        communicates=False,
        limits=("time", "memory"),
        written_by_hand=("minidist.core.pipeline.plan.registry.get_schedule",),
    )


def timing_of(schedule: str, stages: int, microbatches: int) -> Timing:
    return time_plan(get_schedule(schedule).plan(stages, microbatches))


def number(text: str, schedule: str, answer: Callable[[int, int], Any], *hints: Hint) -> Puzzle:
    """Return the puzzle of a number about a schedule, whose right value is simulated; its plan is the picture."""

    def picture(case: Case, given: Any) -> list[Trace]:
        orders = get_schedule(schedule).plan(case.size, case.seed).orders
        return drawn(case, [[show(item).lstrip("0123456789") for item in order] for order in orders])

    return puzzle(
        text,
        [Case(1, p, m) for p, m in ((1, 1), (3, 2), (4, 8))],
        *hints,
        picture=picture,
        arguments=size_of,
        expected=lambda case: [answer(case.size, case.seed)],
        label=describe,
        communicates=False,
    )


def enough(stages: int) -> int:
    """Return the least number of micro-batches with which GPipe's bubble is at most a quarter of its work."""
    return next(m for m in range(1, 1000) if timing_of("gpipe", stages, m).bubble_of_ideal <= 0.25)


COMMON = hints_of({}, "schedules")
OF_PLANS = (
    raises(NameError, 'an action is a text, in quotation marks: "F0"'),
    says("your lists go to", "micro-batches are numbered from 0 to m - 1, and each of them runs on each stage"),
)

PUZZLES = [
    plan_puzzle(
        """
        s01 Forward, then backward
        One stage, one micro-batch. F0 is its forward, and what is missing is its backward.

        def forward_then_backward(p, m):
            return [["F0", ____]]
        """,
        [(1, 1)],
    ),
    plan_puzzle(
        """
        s02 One alive at a time
        One stage, three micro-batches: F0, F1, F2 and B0, B1, B2. Have one of them alive at a time.

        def one_alive_at_a_time(p, m):
            return [[____]]
        """,
        [(1, 3)],
        above("memory", "more micro-batches are alive than necessary: B frees what F has kept"),
    ),
    plan_puzzle(
        """
        s03 Two stages
        Stage 1 gets the output of stage 0, and stage 0 the gradient of stage 1. Write the list of stage 1.

        def two_stages(p, m):
            return [["F0", "B0"], [____]]
        """,
        [(2, 1)],
    ),
    plan_puzzle(
        """
        s04 The same order of backwards
        GPipe runs all forwards, then all backwards. Stage 0 begins its backwards with the newest, B1. Write
        stage 1.

        def same_order(p, m):
            return [["F0", "F1", "B1", "B0"], [____]]
        """,
        [(2, 2)],
        above("time", "stage 0 waits for B1, and stage 1 makes B0 first: newest first, on both"),
    ),
    plan_puzzle(
        """
        s05 One action is missing
        A stage that has had enough forwards in flight does one backward, one forward in turn. What is missing?

        def one_is_missing(p, m):
            return [
                ["F0", "F1", "B0", ____, "B1", "B2"],
                ["F0", "B0", "F1", "B1", "F2", "B2"],
            ]
        """,
        [(2, 3)],
    ),
    plan_puzzle(
        """
        s06 No deadlock
        Stage 0 has room for one micro-batch, so it waits for B0 before F1. Write a list for stage 1 with which this
        ends.

        def no_deadlock(p, m):
            return [["F0", "B0", "F1", "B1"], [____]]
        """,
        [(2, 2)],
        says("deadlock", "stage 1 waits for F1 of stage 0, which waits for B0 of stage 1: B0 comes before F1"),
    ),
    plan_puzzle(
        """
        s07 How far ahead
        In 1F1B stage s runs some forwards before its first pair of F and B: none on the last stage, one more on
        each stage before it, and never more than m.

        def how_far_ahead(p, m):
            lists = []
            for s in range(p):
                ahead = ____
                order = [f"F{i}" for i in range(ahead)]
                for i in range(m):
                    if ahead + i < m:
                        order.append(f"F{ahead + i}")
                    order.append(f"B{i}")
                lists.append(order)
            return lists
        """,
        [(1, 2), (4, 2), (4, 8)],
        above("memory", "the last stage, p - 1, runs no forward ahead: p - 1 - s on stage s"),
        above("time", "some stage has too little in flight: p - 1 - s on stage s"),
    ),
    plan_puzzle(
        """
        s08 One forward, one backward
        The loop of 1F1B: stage s has run `ahead` forwards. In step i it runs the next forward, if there is one,
        then the backward of micro-batch i.

        def one_forward_one_backward(p, m):
            lists = []
            for s in range(p):
                ahead = min(m, p - 1 - s)
                order = [f"F{i}" for i in range(ahead)]
                for i in range(m):
                    ____
                lists.append(order)
            return lists
        """,
        [(1, 2), (3, 2), (4, 8)],
        says("before", "in step i of the last stage, F of micro-batch i comes before its B"),
        says("outside", "the next forward is ahead + i, where this is less than m"),
        says("lists go to", "the next forward is ahead + i, where this is less than m"),
    ),
    plan_puzzle(
        """
        s09 The last stage
        All other stages run 1F1B. The last one has its gradient at once: write its list for any m, with one alive.

        def the_last_stage(p, m):
            lists = []
            for s in range(p - 1):
                ahead = min(m, p - 1 - s)
                order = [f"F{i}" for i in range(ahead)]
                for i in range(m):
                    order += [f"F{ahead + i}", f"B{i}"] if ahead + i < m else [f"B{i}"]
                lists.append(order)
            last = ____
            return [*lists, last]
        """,
        [(2, 1), (2, 4), (4, 8)],
        says("deadlock", "the stages before wait for B0 of the last stage: F0, B0, F1, B1, ..."),
    ),
    number(
        """
        s10 How long GPipe takes
        p equal stages, m micro-batches; F takes 1 and B takes 2. After how many units is GPipe's last backward
        done?

        def how_long(p, m):
            return ____
        """,
        "gpipe",
        lambda p, m: timing_of("gpipe", p, m).makespan,
        says("expected", "one stage works 3 m; the last micro-batch reaches each other stage 1 + 2 units later"),
    ),
    number(
        """
        s11 The bubble
        The bubble is the time that a stage waits, over the time that it works. Of GPipe, with p stages and m
        micro-batches?

        def bubble(p, m):
            return ____
        """,
        "gpipe",
        lambda p, m: timing_of("gpipe", p, m).bubble_of_ideal,
        says("expected", "a stage works for m micro-batches and waits for p - 1; this is over the work, not the whole"),
    ),
    number(
        """
        s12 Enough micro-batches
        What is the least number of micro-batches with which GPipe's bubble on p stages is at most 1/4?

        def enough(p, m):
            return ____
        """,
        "gpipe",
        lambda p, m: enough(p),
        says("expected", "(p - 1) / m is at most 1/4, and there is at least one micro-batch"),
    ),
    number(
        """
        s13 What 1F1B holds
        How many micro-batches does 1F1B hold at once, on each stage from 0 to p - 1? Return a list.

        def what_is_held(p, m):
            return [____ for s in range(p)]
        """,
        "1f1b",
        lambda p, m: timing_of("1f1b", p, m).peak,
        says("expected", "stage s runs p - 1 - s forwards ahead, and one more; there are no more than m"),
    ),
    plan_puzzle(
        """
        s14 Two places on each stage
        Three stages, four micro-batches; no stage has memory for more than two. Write stages 0 and 1 so that the
        whole is as short as this allows.

        def two_places(p, m):
            return [
                [____],
                [____],
                ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
            ]
        """,
        [(3, 4)],
        above("memory", "a third micro-batch is alive: on stage 0, F2 comes after B0"),
        above("time", "stage 0 waits for B1 while stage 1 waits for F2 of stage 0: on stage 1, B1 comes before F2"),
    ),
    plan_puzzle(
        """
        s15 Half a backward
        B is I (the gradient that the stage before waits for) and W (the weights' gradient, for which no stage
        waits). Write stage 1 so that stage 0 waits as little as possible.

        def half_a_backward(p, m):
            return [["F0", "F1", "I0", "W0", "I1", "W1"], [____]]
        """,
        [(2, 2)],
        above("time", "stage 0 waits for I1 while stage 1 does W0: first what others wait for"),
        says("before", "W needs the gradient that I has passed on: I0 before W0"),
    ),
    plan_puzzle(
        """
        s16 When to do W
        ZB-H1 puts the W of stage s off by s micro-batches, so that it fills the time in which the stage would wait.
        When is there one to do?

        def when_to_do_w(p, m):
            lists = []
            for s in range(p):
                ahead = min(m, p - 1 - s)
                order = [f"F{i}" for i in range(ahead)]
                for i in range(m):
                    if ahead + i < m:
                        order.append(f"F{ahead + i}")
                    order.append(f"I{i}")
                    if ____:
                        order.append(f"W{i - s}")
                lists.append(order + [f"W{i}" for i in range(max(0, m - s), m)])
            return lists
        """,
        [(1, 2), (3, 2), (4, 8)],
        says("is not an action", "there is no W-1: on stage s the first W comes after I of micro-batch s"),
        says("is missing", "the first W, W0, comes with i = s"),
    ),
]


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


PUZZLES += [
    of_lesson(
        """
        s17 GPipe
        gpipe(p, m)
        For any p and m: all forwards, then all backwards, as short as GPipe. Return one list per stage.
        """,
        e16_gpipe.EXERCISES[0],
        drawn,
    ),
    of_lesson(
        """
        s18 1F1B
        one_f_one_b(p, m)
        For any p and m, as short as GPipe, with no more micro-batches alive on any stage than 1F1B has there.
        """,
        e17_one_f_one_b.EXERCISES[0],
        drawn,
    ),
    of_lesson(
        """
        s19 Zero bubble
        zero_bubble(p, m)
        For any p and m: with I and W for B, as short as ZB-H1, with no more alive than on 1F1B's fullest stage.
        """,
        e19_zero_bubble.EXERCISES[0],
        drawn,
    ),
    of_lesson(
        """
        s20 A building block
        building_block(p, offsets)
        A micro-batch passes p ranks down and up again, forward and backward; offsets[k] units lie between
        neighbours in pass k. Return when F down, F up, I up and I down start on each rank: repeated every 6 units,
        no two collide (each takes 1 unit), and the two chunks of rank 0 live together as briefly as possible.
        """,
        e19b_building_block.EXERCISES[0],
        passes,
    ),
]
EXERCISES = [item.exercise for item in PUZZLES if item.exercise.name.startswith("puzzle.")]
