"""One job through the core of the course: what changes in it from one lesson to the next, and what this does.

    story("11")     prints the rows of lesson 11 and of the two before it: bytes of the fullest card, seconds of a step
    spent("11")     prints where the seconds of a row go

A model of 7 billion parameters is trained on cards of 80 GB, 2^20 tokens per step. A lesson begins where the one before
it had a limit. On 64 cards with ZeRO 1 this model waits for messages 0.01 s of 1.55 s, and no other layout is faster:
it has no need of what comes after lesson 12. So the last row of lesson 12 and all after it train 65 billion parameters
on 64 cards. Their layouts are the fastest of their kind that fit without recomputation; row 16 cannot fit.

Bytes and seconds are those of the planner, `minidist plan`; a lesson without a layout leaves them as they are. The
planner has no schedule that divides the backward pass: the idle seconds of ZB-H1 are 1F1B's times the ratio of the two
plans' idle times, and its last stage keeps as many micro-batches as its first one. All rows are in 16 bits, with
gradients added up in float32: 2 + 4 + 12 B per parameter. With ZeRO 3 it is 4 + 4 + 8 B, because a rank's part of the
weights is the float32 copy of the optimizer.

Proved by: tests/course/test_story.py
"""

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.core.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan
from minidist.planning.architecture import named
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import ClusterLayout, Job, check_layout
from minidist.planning.cluster.search import Plan

MODEL, LARGE, CARD, TOKENS, LENGTH = "llama-7b", "llama-65b", "h100", 2**20, 2048
SHOWN = 3  # rows that a lesson prints
COMPARED = {"11": "06", "19": "14", "20": "12"}  # a lesson -> the lesson whose row its table begins with
KINDS = {"dp": "gradients and weights", "tp": "in the layers", "cp": "round the ring", "pp": "between stages"}


@dataclass(frozen=True)
class Chapter:
    """A lesson's row: what changes, what the limit is afterwards, and the layout if it changes.

    schedule: of the pipeline's actions, 1F1B if it is None.
    """

    lesson: str
    change: str
    limit: str
    length: int = LENGTH
    model: str = MODEL
    schedule: str | None = None
    layout: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the layout, if the lesson has one."""
        if not self.layout:
            return None
        settings, sequences = dict(self.layout), TOKENS // self.length
        own = sequences // settings.get("dp", 1) // settings.get("micro_batch", 1)
        layout = ClusterLayout(**{"microbatches": own, **settings})
        job = Job(named(self.model), self.length, sequences, gpus=layout.ranks)
        check_layout(layout, job)
        return Plan(layout, job, machine_of(CARD))

    def times(self, plan: Plan) -> tuple[float, float, float]:
        """Return the seconds in which a card computes, waits for messages, and waits for other stages."""
        time, layout = plan.time, plan.layout
        idle = time.seconds * time.bubble
        if self.schedule is not None:
            waits = [
                max(time_plan(get_schedule(name).plan(layout.pp, layout.microbatches)).idle)
                for name in (self.schedule, "1f1b")
            ]
            idle *= waits[0] / waits[1]
        return time.compute, sum(time.exposed.values()), idle

    def memory(self, plan: Plan) -> tuple[float, float]:
        """Return the bytes of the fullest card, and the planner's estimate, by which the layout fits or not.

        The estimate adds half of what norms and activation functions keep when they are not fused, and what the device
        needs.
        """
        if self.schedule is None:
            return plan.fullest.peak, plan.fit.central
        layout, job, stages = plan.layout, plan.job, plan.memory
        first, last, kept = stages[0], stages[-1], min(layout.pp, layout.microbatches)
        unfused = (first.likely(job) - first.peak) / kept

        # The last stage puts off W: of all its micro-batches but one it keeps what the first stage keeps of each, the
        # inputs of the last norm and of the output matrix, and the gradients of the logits.
        tokens = layout.micro_batch * job.length // layout.cp
        inputs = 4 * tokens * job.model.width // (layout.tp if layout.sequence_parallel else 1)
        gradients = 2 * tokens * job.model.vocabulary // layout.tp
        more = (kept - 1) * (first.by_kind["activations"] / kept + inputs + gradients)
        device = plan.fit.central - plan.fullest.likely(job)
        last_estimate = last.likely(job) + more + (kept - 1) * unfused + device
        return max(first.peak, last.peak + more), max(plan.fit.central, last_estimate)


def chapter(
    lesson: str,
    change: str,
    limit: str,
    length: int = LENGTH,
    model: str = MODEL,
    schedule: str | None = None,
    **layout: Any,
) -> Chapter:
    """Return a row."""
    return Chapter(lesson, change, limit, length, model, schedule, tuple(layout.items()))


large = partial(chapter, model=LARGE)

# Data parallelism alone, with which the rows after it are compared.
WHOLE = large("12", "65 billion parameters, ZeRO 3", "weights are gathered: 3.8 s", dp=64, zero=3)

CHAPTERS = [
    chapter("00", "one program on one card, in 16 bits", "it does not fit, and is slow", dp=1),
    chapter("02", "the bytes are counted by kind", "2+4+12 B of states a parameter"),
    chapter("03", "cards exchange messages", "one card that adds all is slow"),
    chapter("04", "sums over all cards, round a ring", "latencies of short arrays"),
    chapter("05", "the algorithm is chosen by the size", "who computes what?"),
    chapter("06", "eight cards, each with its rows", "every card has all states", dp=8),
    chapter("09", "why all rows above are in 16 bits", "all activations are kept"),
    chapter("10", "activations are computed again", "the states alone are 121 GB", dp=8, recompute="full"),
    chapter("11", "ZeRO 1: a part each; no recomputation", "every card has all weights", dp=8, zero=1),
    chapter("12", "ZeRO 3: parameters gathered by layers", "gathers in every micro-batch", dp=8, zero=3),
    WHOLE,
    large(
        "14",
        "layers cut over 4 cards; ZeRO 2",
        "sums in each layer: 1.6 s",
        dp=16,
        zero=2,
        tp=4,
        micro_batch=2,
        sequence_parallel=True,
    ),
    large(
        "16",
        "16 stages; 16 micro-batches of 8; ZeRO 2",
        "all micro-batches are kept",
        dp=4,
        zero=2,
        pp=16,
        micro_batch=8,
    ),
    large("17", "128 micro-batches of 1, 1F1B; ZeRO 2", "idle at both ends: 10 %", dp=4, zero=2, pp=16),
    large(
        "19",
        "the backward pass in two, ZB-H1; ZeRO 2",
        "16 stages: unequal, and idle",
        schedule="zb-h1",
        dp=4,
        zero=2,
        pp=16,
    ),
    large(
        "20",
        "layers cut over 2, 8 stages, ZB-H1; ZeRO 1",
        "longer texts do not fit",
        schedule="zb-h1",
        dp=4,
        zero=1,
        tp=2,
        pp=8,
        sequence_parallel=True,
    ),
    large(
        "22",
        "texts of 32,768 over 8; layers 2; ZeRO 3",
        "the ring: 5.95 s; a card fails",
        32768,
        dp=4,
        zero=3,
        tp=2,
        cp=8,
        sequence_parallel=True,
    ),
    chapter("26", "the state is saved, in pieces", "is it right?"),
    chapter("28", "its layout is compared, on a small model", "what only large models show"),
]


def row(of: Chapter) -> str:
    """Return a line of the table."""
    plan = of.plan
    numbers = " " * 25
    if plan is not None:
        peak, estimate = of.memory(plan)
        fits = "yes" if estimate <= plan.machine.memory else "no"
        numbers = f"{plan.layout.ranks:5} {peak / 1e9:6.1f} {fits:>4} {sum(of.times(plan)):7.2f}"
    return f"{of.lesson}  {of.change:42}{numbers:25}  {of.limit}"


@cache
def table(lesson: str) -> str:
    """Return the row of a lesson and up to two of the same job before it; `COMPARED` has other first rows.

    Raises UsageError for a lesson that is not one of the core.
    """
    lessons = list(dict.fromkeys(each.lesson for each in CHAPTERS))
    if lesson not in lessons:
        raise UsageError(
            f"the story has no lesson {quoted(lesson)}{nearest(lesson, lessons)}; it has {', '.join(lessons)}"
        )
    head = f"    {'what changes':42}{'cards     GB fits       s':25}  what limits it now"
    known = lessons[: lessons.index(lesson) + 1]
    rows = [each for each in CHAPTERS if each.lesson in known]
    if rows[-1] is not WHOLE and WHOLE in rows:
        rows = rows[rows.index(WHOLE) :]
    shown = rows[-SHOWN:]
    if lesson in COMPARED:
        (shown[0],) = (each for each in rows if each.lesson == COMPARED[lesson])
    return "\n".join([head, *map(row, shown)])


def story(lesson: str) -> None:
    """Print the last rows up to a lesson."""
    print(table(lesson))


def spent(lesson: str, schedule: str | None = None, **layout: Any) -> None:
    """Print where the seconds of a lesson's row go, or those of another layout and schedule of the same job."""
    of = [each for each in CHAPTERS if each.lesson == lesson][-1]
    if layout:
        of = chapter(lesson, "", "", of.length, of.model, schedule, **layout)
    plan = of.plan
    if plan is None:
        raise UsageError(f"row {lesson} has no layout")
    name = f"{of.model}, {plan.layout}" + f", {schedule}" * (schedule is not None) if layout else f"row {lesson}"
    compute, messages, idle = of.times(plan)

    # Each kind of messages that takes at least a hundredth of a second is told.
    kinds = [f"{KINDS[axis]} {seconds:.2f}" for axis, seconds in plan.time.exposed.items() if seconds >= 0.005]
    parts = f" ({', '.join(kinds)})" if len(kinds) > 1 else ""
    stages = f", for other stages {idle:.2f} s" if idle else ""
    print(f"{name}: computes {compute:.2f} s, waits for messages {messages:.2f} s{parts}{stages}", end="; ")

    # The estimate is told where it decides.
    peak, estimate = of.memory(plan)
    decides = peak < plan.machine.memory < estimate
    added = "half of what unfused norms and activations would keep, and 1 GB for the device"
    more = f", {estimate / 1e9:.1f} GB with {added}: it does not fit" if decides else ""
    print(f"at most {peak / 1e9:.1f} GB on each of {plan.layout.ranks} cards{more}")
