"""Our solution of lesson 09d; it is not a part of the package."""

from collections.abc import Callable

import numpy as np

from minidist.core.comm import Comm

CLASSES = 4


def distil(
    comm: Comm, teachers: int, logits: Callable[[int], np.ndarray], rows: int, temperature: float
) -> np.ndarray:
    """Each teacher computes the soft targets of every `teachers`-th student, and sends them."""
    if comm.rank < teachers:
        for student in range(comm.rank, comm.size - teachers, teachers):
            scores = np.exp(logits(student) / temperature)
            comm.send(scores / scores.sum(axis=1, keepdims=True), teachers + student)
        return np.zeros((0, CLASSES))
    targets = np.zeros((rows, CLASSES))
    comm.recv(targets, (comm.rank - teachers) % teachers)
    return targets


SOLUTIONS = {"09d.distil": distil}
