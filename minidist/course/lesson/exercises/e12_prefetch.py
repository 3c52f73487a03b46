"""Lesson 12: a forward pass over sharded layers whose gathers overlap with the layer before."""

from typing import Any

import numpy as np

from minidist.base.memory import MemoryAccount
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Least, drawing

SECONDS = 2e-6  # of computing, for each rank that takes part: longer than a gather takes


class Gather:
    """A gather that runs; `wait()` returns the whole layer."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> np.ndarray:
        weights: np.ndarray = self._work.wait()
        return weights


class Run:
    """The shards of one rank, and the account of the layers that are whole."""

    def __init__(self, comm: Comm, shards: list[np.ndarray]) -> None:
        self.comm, self.shards, self.layers = comm, shards, len(shards)
        self.account = MemoryAccount(timeline=True)

    def gather(self, layer: int) -> Gather:
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} is out of range: there are layers 0..{self.layers - 1}")
        mine = self.shards[layer]
        out = self.account.track(np.full(mine.size * self.comm.size, np.nan), "unsharded")
        return Gather(all_gather(self.comm, mine, out=out, async_op=True))

    def compute(self, layer: int, weights: np.ndarray, x: float) -> float:
        self.comm.compute(seconds=SECONDS * self.comm.size, name="forward")
        return through(layer, weights, x)


def whole_layers(case: Case) -> list[np.ndarray]:
    """Return layers of equal size, a multiple of the number of ranks."""
    draw = case.generator()
    return [draw.integers(1, 99, 4 * case.ranks) * 1.0 for _ in range(case.size)]


def through(layer: int, weights: np.ndarray, x: float) -> float:
    """Return a number that depends on every weight, its place and the order of the layers."""
    return float((3 * x + layer + weights @ np.arange(1, weights.size + 1)) % 1009)


def shards_of(case: Case, rank: int) -> tuple[list[np.ndarray]]:
    return ([np.array_split(layer, case.ranks)[rank].copy() for layer in whole_layers(case)],)


def setup(comm: Comm, shards: list[np.ndarray]) -> tuple[Any, ...]:
    run = Run(comm, shards)
    return run.layers, float(comm.rank), run.gather, run.compute


def answer(arguments: tuple[Any, ...], returned: Any) -> Any:
    run: Run = arguments[2].__self__
    run.comm.trace.memory.extend((0.0, live) for live in run.account.history())
    return returned


def truth(case: Case) -> list[float]:
    answers = []
    for rank in range(case.ranks):
        x = float(rank)
        for layer, weights in enumerate(whole_layers(case)):
            x = through(layer, weights, x)
        answers.append(x)
    return answers


EXERCISES = [
    Exercise(
        name="12.prefetch",
        arguments=shards_of,
        setup=setup,
        expected=truth,
        answer=answer,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 3, 4, 5) for size in (0, 1, 2, 3, 6)],
        draw=drawing((1, 6), (0, 7)),
        least=lambda case: Least(case.ranks * case.size, 8 * 4 * case.ranks * case.size * (case.ranks - 1)),
        par=Case(4, 6),
        unit="layer",
        limits=("bytes", "time", "memory"),
        for_hints={
            "not_a_number": lambda f: None not in f.answers and bool(np.isnan(np.asarray(f.answers, float)).any()),
            "own_ranks": lambda case: [float(rank) for rank in range(case.ranks)],
        },
    )
]
