"""Lesson 12b: an optimizer's step on the host, piece by piece, that keeps the link and the host busy at once."""

from typing import Any

import numpy as np

from minidist.base.memory import MemoryAccount
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, drawing

SECONDS = 1e-5  # a piece on the link, each way
STEPS = (0.5, 1.0, 2.0)  # times as long the host needs for a piece, by the case's seed
SIZE = 4  # elements of a piece


class Transfer:
    """A piece on the link; `wait()` returns the array that it was copied to."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> np.ndarray:
        array: np.ndarray = self._work.wait()
        return array


class Run:
    """One rank's device and host, and the account of the gradients that are on the host."""

    def __init__(self, comm: Comm, seconds: float, device: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        self.comm, self.seconds, self.device, self.gradients = comm, seconds, device, gradients
        self.pieces = len(device)
        self.host = [values.copy() for values in self.device]
        self.account = MemoryAccount(timeline=True)
        self.streams = {"to host": comm.dup(), "to device": comm.dup()}

    def down(self, piece: int) -> Transfer:
        self.known(piece)
        buffer = self.account.track(np.full(SIZE, np.nan), "gradient")
        return self.transfer("to host", self.gradients[piece], buffer)

    def step(self, piece: int, gradient: np.ndarray) -> np.ndarray:
        self.known(piece)
        self.comm.compute(seconds=self.seconds, name="host step")
        self.host[piece] -= 0.5 * gradient
        return self.host[piece]

    def up(self, piece: int, values: np.ndarray) -> Transfer:
        self.known(piece)
        return self.transfer("to device", values, self.device[piece])

    def transfer(self, way: str, source: np.ndarray, target: np.ndarray) -> Transfer:
        def copy() -> np.ndarray:
            self.comm.compute(seconds=SECONDS, name=way)
            target[:] = source
            return target

        return Transfer(self.streams[way].collective(way).run_async(copy))

    def known(self, piece: int) -> None:
        if not 0 <= piece < self.pieces:
            raise IndexError(f"piece {piece} is out of range: there are pieces 0..{self.pieces - 1}")


def device_of(case: Case, rank: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the values and gradients of each piece."""
    draw = case.generator(rank)
    values, gradients = (draw.integers(1, 99, (case.size, SIZE)) * 1.0 for _ in range(2))
    return list(values), list(gradients)


def setup(comm: Comm, seconds: float, device: list[np.ndarray], gradients: list[np.ndarray]) -> tuple[Any, ...]:
    run = Run(comm, seconds, device, gradients)
    return run.pieces, run.down, run.step, run.up


def answer(arguments: tuple[Any, ...], returned: Any) -> Any:
    run: Run = arguments[2].__self__
    run.comm.trace.memory.extend((0.0, live) for live in run.account.history())
    return np.concatenate([np.zeros(0), *run.device])


def truth(case: Case) -> list[np.ndarray]:
    answers = []
    for rank in range(case.ranks):
        values, gradients = device_of(case, rank)
        answers.append(np.concatenate([np.zeros(0), *(v - 0.5 * g for v, g in zip(values, gradients, strict=True))]))
    return answers


EXERCISES = [
    Exercise(
        name="12b.offloaded_step",
        arguments=lambda case, rank: (SECONDS * STEPS[case.seed % 3], *device_of(case, rank)),
        setup=setup,
        expected=truth,
        answer=answer,
        cases=lambda: [Case(ranks, size, seed) for ranks in (1, 2) for size in (0, 1, 2, 3, 6) for seed in range(3)],
        draw=drawing((1, 2), (0, 7)),
        par=Case(1, 6, 1),
        unit="piece",
        limits=("time", "memory"),
    )
]
