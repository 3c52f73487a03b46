"""A quiz bank whose answers are measured: each question runs a program, and its trace or its timing is the answer.

Wrong choices are typical mistakes, computed from the same numbers. A seed draws the numbers, so every class, or every
student, has its own bank. `quiz_files` writes it in the formats of learning platforms.

Proved by: tests/lesson/test_quiz.py
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minidist.collectives import gather
from minidist.comm import SimWorld
from minidist.core.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from minidist.core.comm import Comm
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan

CHOICES = 4


@dataclass(frozen=True)
class Question:
    """One multiple-choice question: `right` is measured, `wrong` are typical mistakes, `because` explains it."""

    name: str
    text: str
    right: str
    wrong: tuple[str, ...]
    because: str

    def choices(self) -> list[str]:
        """Return the choices in an order that depends on the text only."""
        draw = np.random.default_rng(zlib.crc32(self.text.encode()))
        every = [self.right, *self.wrong]
        return [every[i] for i in draw.permutation(len(every))]


def question(name: str, text: str, right: float, wrong: Sequence[float], unit: str, because: str) -> Question:
    """Return a question with CHOICES different choices; where mistakes coincide, multiples of the answer fill up."""
    shown = {_number(right, unit)}
    others: list[str] = []
    for value in (*wrong, 2 * right, right / 2, 3 * right, right + 1):
        label = _number(value, unit)
        if label not in shown and len(others) < CHOICES - 1:
            shown.add(label)
            others.append(label)
    return Question(name, text, _number(right, unit), tuple(others), because)


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f}{unit}" if unit != " %" else f"{100 * value:.1f} %"


def sent(ranks: int, program: Callable[[Comm], object], what: str = "bytes") -> int:
    """Run a program and return the most bytes, or messages, that one rank sends."""
    world = SimWorld(ranks)
    world.run(program)
    if what == "messages":
        return max(len(trace.sent()) for trace in world.traces)
    return max(sum(message.nbytes for message in trace.sent()) for trace in world.traces)


@dataclass(frozen=True)
class Kind:
    """A kind of question. text, because: with the drawn numbers in braces.

    draw: the numbers by name. right: runs a program and measures. wrong: typical mistakes, from the same numbers.
    """

    name: str
    text: str
    draw: Callable[[np.random.Generator], dict[str, int]]
    right: Callable[..., float]
    wrong: Callable[..., Sequence[float]]
    unit: str
    because: str

    def question(self, draw: np.random.Generator) -> Question:
        """Return the question of the numbers that are drawn next."""
        numbers = self.draw(draw)
        texts = self.text.format(**numbers), self.because.format(**numbers)
        return question(self.name, texts[0], self.right(**numbers), self.wrong(**numbers), self.unit, texts[1])


def received_by_rank_0(ranks: int, program: Callable[[Comm], object]) -> int:
    """Run a program and return the messages that rank 0 receives."""
    world = SimWorld(ranks)
    world.run(program)
    return sum(message.kind == "receive" for message in world.traces[0].messages)


def pipeline(draw: np.random.Generator) -> dict[str, int]:
    """Draw stages, micro-batches, at least one more, and a stage."""
    p = int(draw.integers(3, 9))
    return {"p": p, "m": p + int(draw.integers(1, 9)), "stage": int(draw.integers(0, p))}


KINDS = (
    Kind(
        "ring all-reduce, bytes",
        "{n} ranks all-reduce an array of {size:,} bytes round a ring. How many bytes does each rank send?",
        lambda draw: {"n": int(draw.integers(3, 9)), "size": 8 * 840 * int(draw.integers(1, 9))},
        lambda n, size: sent(n, lambda comm: all_reduce(comm, np.zeros(size // 8))),
        lambda n, size: (size, 2 * size, (n - 1) * size / n, (n - 1) * size),
        " B",
        "2 (n-1)/n of the array: (n-1)/n in the reduce-scatter, as much in the all-gather; n = {n}",
    ),
    Kind(
        "ring all-reduce, messages",
        "How many messages does each of {n} ranks send in a ring all-reduce?",
        lambda draw: {"n": int(draw.integers(3, 13))},
        lambda n: sent(n, lambda comm: all_reduce(comm, np.zeros(40)), "messages"),
        lambda n: (n - 1, n, 2 * n, n * (n - 1)),
        "",
        "n-1 in each of the two halves: 2 ({n}-1)",
    ),
    Kind(
        "recursive doubling, messages",
        "How many messages does each of {n} ranks send in an all-reduce by recursive doubling?",
        lambda draw: {"n": 2 ** int(draw.integers(2, 6))},
        lambda n: sent(n, lambda comm: all_reduce(comm, np.zeros(4), algorithm="recursive_doubling"), "messages"),
        lambda n: (2 * np.log2(n), n - 1, n / 2, n),
        "",
        "log2 n rounds, one message each: log2 {n}",
    ),
    Kind(
        "all-gather, bytes",
        "{n} ranks hold {size:,} bytes each and all-gather them round a ring. How many bytes does each rank send?",
        lambda draw: {"n": int(draw.integers(3, 9)), "size": 80 * int(draw.integers(1, 9))},
        lambda n, size: sent(n, lambda comm: all_gather(comm, np.zeros(size // 8))),
        lambda n, size: (size, n * size, 2 * (n - 1) * size, (n - 1) * size / n),
        " B",
        "n-1 steps, in each a part of {size} bytes",
    ),
    Kind(
        "reduce-scatter, bytes",
        "{n} ranks reduce-scatter an array of {size:,} bytes round a ring. How many bytes does each rank send?",
        lambda draw: {"n": (n := int(draw.integers(3, 9))), "size": 8 * n * int(draw.integers(10, 90))},
        lambda n, size: sent(n, lambda comm: reduce_scatter(comm, np.zeros(size // 8))),
        lambda n, size: (size, 2 * (n - 1) * size / n, (n - 1) * size, size / n),
        " B",
        "n-1 steps, in each a chunk of 1/n of the array",
    ),
    Kind(
        "gather, messages",
        "Rank 0 gathers an array from each of {n} ranks, without a tree. How many messages does it receive?",
        lambda draw: {"n": int(draw.integers(4, 17))},
        lambda n: received_by_rank_0(n, lambda comm: gather(comm, np.zeros(3), algorithm="naive")),
        lambda n: (n, 2 * (n - 1), n * (n - 1), n // 2),
        "",
        "one from every rank but itself",
    ),
    Kind(
        "all-to-all, bytes",
        "Each of {n} ranks has {size:,} bytes, the same number for each rank, and they exchange them in an all-to-all."
        " How many bytes does each rank send?",
        lambda draw: {"n": (n := int(draw.integers(3, 9))), "size": 8 * n * int(draw.integers(10, 60))},
        lambda n, size: sent(n, lambda comm: all_to_all(comm, np.zeros(size // 8))),
        lambda n, size: (size, n * size, (n - 1) * size, size / n),
        " B",
        "all but its own piece: (n-1)/n",
    ),
    Kind(
        "GPipe, bubble",
        "GPipe runs {m} micro-batches through {p} stages that take equally long. Which part of its time does a stage"
        " wait?",
        lambda draw: {"p": int(draw.integers(2, 9)), "m": int(draw.integers(2, 25))},
        lambda p, m: time_plan(get_schedule("gpipe").plan(p, m)).bubble_of_total,
        lambda p, m: ((p - 1) / m, 1 / m, p / (m + p), (p - 1) / (2 * m + p)),
        " %",
        "(p-1)/(m+p-1) with p = {p} and m = {m}",
    ),
    Kind(
        "1F1B, activations",
        "1F1B runs {m} micro-batches through {p} stages. Of how many are activations alive at once on stage {stage}, at"
        " most? Stages are numbered from 0.",
        pipeline,
        lambda p, m, stage: time_plan(get_schedule("1f1b").plan(p, m)).peak[stage],
        lambda p, m, stage: (m, p, stage + 1, p - stage - 1),
        "",
        "p - s: {p} - {stage}",
    ),
)


def bank(count: int, seed: int) -> list[Question]:
    """Return `count` different questions that a seed draws, the kinds in turn."""
    draw, found = np.random.default_rng(seed), dict[str, Question]()
    tries = 0
    while len(found) < count and tries < 50 * count:
        made = KINDS[tries % len(KINDS)].question(draw)
        found.setdefault(made.text, made)
        tries += 1
    return list(found.values())
