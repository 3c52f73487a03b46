"""Our solutions of lesson 14c; they are not a part of the package."""

from collections.abc import Callable
from math import ceil

import numpy as np

from minidist.core.collectives import all_to_all
from minidist.core.comm import Comm


def slots_and_balance(
    probabilities: np.ndarray, factor: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """Give out slots in token order; the loss is N sum f P, and its gradient runs through P alone."""
    tokens, experts = probabilities.shape
    capacity = ceil(tokens / experts * factor)
    choice = probabilities.argmax(axis=1)
    slots, filled = np.full(tokens, -1), np.zeros(experts, int)
    for token, expert in enumerate(choice):
        if filled[expert] < capacity:
            slots[token] = expert * capacity + filled[expert]
            filled[expert] += 1
    share = np.bincount(choice, minlength=experts) / tokens
    loss = experts * float(share @ probabilities.mean(axis=0))
    return slots, loss, np.broadcast_to(experts * share / tokens, probabilities.shape)


def dispatch(
    comm: Comm, slots: np.ndarray, run_expert: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Send tokens, not weights: an all-to-all, the experts of this rank, and an all-to-all back."""
    experts, capacity, width = slots.shape
    here = experts // comm.size
    arrived = all_to_all(comm, slots.reshape(-1)).reshape(comm.size, here, capacity, width)
    done = np.empty_like(arrived)
    for local in range(here):
        rows = arrived[:, local].reshape(-1, width)
        done[:, local] = run_expert(comm.rank * here + local, rows).reshape(
            comm.size, capacity, width
        )
    return all_to_all(comm, done.reshape(-1)).reshape(experts, capacity, width)


SOLUTIONS = {"14c.slots_and_balance": slots_and_balance, "14c.dispatch": dispatch}
