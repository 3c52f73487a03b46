"""Lesson 14c: slots and a loss that balances; dispatch of the tokens to their experts, and combine."""

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from minidist.core.autograd import Parameter, Tensor
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, drawing

WIDTH = 3


# --- slots and balance ---


def routing(case: Case) -> tuple[np.ndarray, float]:
    """Return probabilities of `case.size` tokens for `case.ranks` experts, and a capacity factor."""
    draw = case.generator()
    logits = draw.normal(size=(case.size, case.ranks)) * 2
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probabilities, float(draw.choice([0.5, 1.0, 1.25, 4.0]))


def routing_cases() -> list[Case]:
    draw = np.random.default_rng(0)
    cases = [Case(experts, tokens) for experts in (1, 2, 3, 4) for tokens in (1, 3, 7, 10)]
    return sorted(cases + [Case(int(draw.integers(1, 9)), int(draw.integers(5, 60)), seed + 1) for seed in range(10)])


def slots_with(case: Case, capacity: Callable[[float], int] = ceil, later_first: bool = False) -> np.ndarray:
    """Return the slots when the capacity is rounded otherwise, or the last tokens come first."""
    probabilities, factor = routing(case)
    tokens, experts = probabilities.shape
    room = capacity(tokens / experts * factor)
    slots, filled = np.full(tokens, -1), np.zeros(experts, int)
    order = reversed(range(tokens)) if later_first else range(tokens)
    for token in order:
        expert = int(probabilities[token].argmax())
        if filled[expert] < room:
            slots[token] = expert * room + filled[expert]
            filled[expert] += 1
    return slots


def balanced(case: Case) -> tuple[np.ndarray, float, np.ndarray]:
    """Return the slots, and of the loss N sum f P its value and the gradient that autograd finds."""
    numbers, _ = routing(case)
    share = np.bincount(numbers.argmax(axis=1), minlength=case.ranks) / case.size
    probabilities = Parameter(numbers)
    loss = (probabilities * Tensor(share)).sum() * (case.ranks / case.size)
    loss.backward()
    return slots_with(case), loss.item(), np.asarray(probabilities.grad)


def wrong_in(f: Failure) -> set[str]:
    """Return which of the three results differ."""
    if f.kind != "wrong" or not isinstance(f.answers[0], tuple) or len(f.answers[0]) != 3:
        return set()
    pairs = zip(("slots", "loss", "gradient"), f.answers[0], f.expected[0], strict=True)
    return {name for name, got, wanted in pairs if np.shape(got) != np.shape(wanted) or not np.allclose(got, wanted)}


def right_slots(f: Failure, slots: np.ndarray) -> bool:
    return bool(wrong_in(f)) and np.array_equal(f.answers[0][0], slots)


def loss_is(f: Failure, value: Callable[[np.ndarray, np.ndarray], float]) -> bool:
    probabilities, _ = routing(f.case)
    share = np.bincount(probabilities.argmax(axis=1), minlength=f.case.ranks) / f.case.size
    return "loss" in wrong_in(f) and bool(np.allclose(f.answers[0][1], value(share, probabilities.mean(axis=0))))


def counts_kept_tokens(f: Failure) -> bool:
    """Return whether the loss is that of the tokens that have a slot, as a share of all tokens or of those."""
    probabilities, _ = routing(f.case)
    kept = slots_with(f.case) >= 0
    share = np.bincount(probabilities.argmax(axis=1)[kept], minlength=f.case.ranks)
    loss = f.case.ranks * float(share @ probabilities.mean(axis=0))
    return any(np.allclose(f.answers[0][1], loss / tokens) for tokens in (f.case.size, max(1, kept.sum())))


# --- dispatch ---


def shapes(case: Case) -> tuple[int, int]:
    """Return (experts, capacity)."""
    return case.ranks * (1 + case.size % 3), 1 + case.size % 4


def slots_of(case: Case, rank: int) -> np.ndarray:
    return case.generator(rank).integers(-9, 10, (*shapes(case), WIDTH)) * 1.0


class Experts:
    """The experts of one rank. Raises LookupError for an expert of another rank."""

    def __init__(self, case: Case, rank: int) -> None:
        here = shapes(case)[0] // case.ranks
        self.mine, self.rank = range(rank * here, (rank + 1) * here), rank

    def __call__(self, expert: int, rows: np.ndarray) -> np.ndarray:
        if expert not in self.mine:
            raise LookupError(f"rank {self.rank} has the experts {list(self.mine)}, not {expert}")
        return compute(expert, rows)


def compute(expert: int, rows: np.ndarray) -> np.ndarray:
    return rows * (expert + 2) + expert


def arguments(case: Case, rank: int) -> tuple[Any, ...]:
    return slots_of(case, rank), Experts(case, rank)


def truth(case: Case) -> Sequence[np.ndarray]:
    return [np.stack([compute(e, rows) for e, rows in enumerate(slots_of(case, rank))]) for rank in range(case.ranks)]


def swapped_back(case: Case) -> list[np.ndarray]:
    """Return the answers when results are sent back as they arrived, experts first instead of source ranks first."""
    experts, capacity = shapes(case)
    here, n = experts // case.ranks, case.ranks
    sent = []
    for rank in range(n):
        arrived = np.stack([slots_of(case, source).reshape(n, here, capacity, WIDTH)[rank] for source in range(n)])
        done = np.stack([compute(rank * here + e, arrived[:, e].reshape(-1, WIDTH)) for e in range(here)])
        sent.append(done.reshape(n, -1))  # pieces for the ranks, of an array in the order (experts, sources)
    return [
        np.concatenate([sent[source][rank] for source in range(n)]).reshape(experts, capacity, WIDTH)
        for rank in range(n)
    ]


def never_back(case: Case) -> list[np.ndarray]:
    """Return the answers when results stay where their experts are."""
    experts = np.array_split(np.arange(shapes(case)[0]), case.ranks)
    arrived = [slots_of(case, source) for source in range(case.ranks)]
    return [np.stack([compute(e, slots[e]) for slots in arrived for e in here]) for here in experts]


EXERCISES = [
    Exercise(
        name="14c.slots_and_balance",
        arguments=lambda case, rank: routing(case),
        expected=lambda case: [balanced(case)] * case.ranks,
        answer=lambda arguments, returned: returned,
        cases=routing_cases,
        draw=drawing((1, 9), (1, 60)),
        par=Case(4, 10),
        communicates=False,
        label=lambda case: (
            f"{case.size} token{'s' * (case.size != 1)}, {case.ranks} expert{'s' * (case.ranks != 1)},"
            f" capacity factor {routing(case)[1]}"
        ),
        for_hints={
            "rounded_down": lambda f: right_slots(f, slots_with(f.case, int)) and "slots" in wrong_in(f),
            "later_first": lambda f: right_slots(f, slots_with(f.case, later_first=True)) and "slots" in wrong_in(f),
            "mean_squared": lambda f: loss_is(f, lambda share, mean: float(len(share) * (mean @ mean))),
            "not_times_experts": lambda f: loss_is(f, lambda share, mean: float(share @ mean)),
            "kept_tokens_only": lambda f: {"loss"} <= wrong_in(f) and counts_kept_tokens(f),
            "gradient_only": lambda f: wrong_in(f) == {"gradient"},
            "slots_only": lambda f: wrong_in(f) == {"slots"},
        },
    ),
    Exercise(
        name="14c.dispatch",
        arguments=arguments,
        expected=truth,
        least=lambda case: Least(2 * (case.ranks - 1), 8 * 2 * (case.ranks - 1) * WIDTH * prod(shapes(case))),
        par=Case(4, 5),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {shapes(case)[0]} expert{'s' * (shapes(case)[0] != 1)},"
            f" {shapes(case)[1]} slot{'s' * (shapes(case)[1] != 1)} each"
        ),
        limits=("bytes",),
        for_hints={"unchanged": lambda f: f.answers_are([slots_of(f.case, rank) for rank in range(f.case.ranks)])},
    ),
]
