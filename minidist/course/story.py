"""One job through the core of the course: what changes in it from one lesson to the next, and what this does.

    story("11")     prints the rows of lesson 11 and of the two before it: bytes of the fullest card, seconds of a step
    spent("11")     prints where the seconds of a row go

A model of 7 billion parameters is trained on cards of 80 GB, 2^20 tokens per step. A lesson begins where the one before
it had a limit. Bytes and seconds are those of the planner, `minidist plan`; a lesson without a layout leaves them as
they are. All rows are in 16 bits, with gradients added up in float32: 2 + 4 + 12 B per parameter.

Proved by: tests/course/test_story.py
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from minidist.core.base.errors import UsageError, nearest, quoted
from minidist.planning.architecture import named
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import ClusterLayout, Job, check_layout
from minidist.planning.cluster.search import Plan, plan_layout

MODEL, CARD, TOKENS, LENGTH = "llama-7b", "h100", 2**20, 2048
SHOWN = 3  # rows that a lesson prints


@dataclass(frozen=True)
class Chapter:
    """A lesson's row: what changes, what the limit is afterwards, and the layout if it changes."""

    lesson: str
    change: str
    limit: str
    length: int = LENGTH
    layout: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the layout, if the lesson has one."""
        if not self.layout:
            return None
        settings, sequences = dict(self.layout), TOKENS // self.length
        own = sequences // settings.get("dp", 1) // settings.get("micro_batch", 1)
        layout = ClusterLayout(**{"microbatches": own, **settings})
        job = Job(named(MODEL), self.length, sequences, gpus=layout.ranks)
        check_layout(layout, job)
        return plan_layout(layout, job, machine_of(CARD))


def chapter(lesson: str, change: str, limit: str, length: int = LENGTH, **layout: Any) -> Chapter:
    """Return a row."""
    return Chapter(lesson, change, limit, length, tuple(layout.items()))


CHAPTERS = [
    chapter("00", "one program on one card, in 16 bits", "it does not fit, and is slow", dp=1),
    chapter("02", "the bytes are counted by kind", "2+4+12 B of states a parameter"),
    chapter("03", "cards exchange messages", "a program may hang"),
    chapter("04", "sums over all cards, round a ring", "latencies of short arrays"),
    chapter("05", "the algorithm is chosen by the size", "who computes what?"),
    chapter("06", "eight cards, each with its rows", "every card has all states", dp=8),
    chapter("09", "why all rows above are in 16 bits", "the range of float16"),
    chapter("10", "activations are computed again", "the states alone are 121 GB", dp=8, recompute="full"),
    chapter("11", "ZeRO 2: a part each; no recomputation", "every card has all weights", dp=8, zero=2),
    chapter("12", "ZeRO 3: parameters gathered by layers", "gathers in every micro-batch", dp=8, zero=3),
    chapter(
        "14",
        "layers cut over 8; micro-batches of 8",
        "sums in each layer: a third",
        dp=8,
        zero=1,
        tp=8,
        micro_batch=8,
        sequence_parallel=True,
    ),
    chapter(
        "16",
        "8 stages, 8 replicas; 8 micro-batches of 8",
        "92 GB with temporaries; waiting",
        dp=8,
        zero=1,
        pp=8,
        micro_batch=8,
    ),
    chapter("17", "64 micro-batches of 1; 1F1B keeps 8", "waiting at both ends", dp=8, zero=1, pp=8),
    chapter("19", "backward in two; one half fills the gaps", "which axis on which cards?"),
    chapter(
        "20",
        "layers cut over 2 in a node; 4 stages",
        "as fast in 11 GB; a longer text",
        dp=8,
        zero=1,
        tp=2,
        pp=4,
        sequence_parallel=True,
    ),
    chapter(
        "22",
        "texts of 32,768, over 4 cards; no stages",
        "a card that fails",
        32768,
        dp=4,
        zero=1,
        tp=4,
        cp=4,
        sequence_parallel=True,
    ),
    chapter("26", "the state is saved, in pieces", "is it right?"),
    chapter("28", "every step is compared with one device", "none"),
]


def row(of: Chapter) -> str:
    """Return a line of the table."""
    plan = of.plan
    numbers = " " * 25
    if plan is not None:
        gigabytes, fits = plan.fullest.peak / 1e9, "yes" if plan.fits else "no"
        numbers = f"{plan.layout.ranks:5} {gigabytes:6.1f} {fits:>4} {plan.time.seconds:7.2f}"
    return f"{of.lesson}  {of.change:42}{numbers:25}  {of.limit}"


@cache
def table(lesson: str) -> str:
    """Return the row of a lesson and the two before it. Raises UsageError for a lesson that is not one of the core."""
    lessons = [each.lesson for each in CHAPTERS]
    if lesson not in lessons:
        raise UsageError(
            f"the story has no lesson {quoted(lesson)}{nearest(lesson, lessons)}; it has {', '.join(lessons)}"
        )
    head = f"    {'what changes':42}{'cards     GB fits       s':25}  what limits it now"
    return "\n".join([head, *map(row, CHAPTERS[: lessons.index(lesson) + 1][-SHOWN:])])


def story(lesson: str) -> None:
    """Print the last rows up to a lesson."""
    print(table(lesson))


def spent(lesson: str, **layout: Any) -> None:
    """Print where the seconds of a lesson's row go, or those of another layout of the same job."""
    (of,) = (each for each in CHAPTERS if each.lesson == lesson)
    plan = chapter(lesson, "", "", of.length, **layout).plan if layout else of.plan
    if plan is None:
        raise UsageError(f"row {lesson} has no layout")
    name = ", ".join(f"{axis} {size}" for axis, size in layout.items()) or f"row {lesson}"
    waits = sum(plan.time.exposed.values())
    print(f"{name}: computes {plan.time.compute:.2f} s, waits for messages {waits:.2f} s", end="; ")

    # A fullest card is without the temporaries of a layer. They are told where they decide.
    decide = not plan.fits and plan.fullest.peak < plan.fit.machine.memory
    more = f", {plan.fit.central / 1e9:.1f} GB with temporaries: it does not fit" if decide else ""
    print(f"{plan.fullest.peak / 1e9:.1f} GB on each of {plan.layout.ranks} cards{more}")
