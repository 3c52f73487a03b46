"""Pruning by magnitude: how many weights are zero after how many steps, and which ones.

A schedule raises the sparsity s (the share of zeros) from 0 to its final value, fast while many weights are superfluous
and slowly near the end; between two of its steps the network recovers. With t steps done, for t = t0, t0 + d, ..., t1,

    s_t = s_f + (s_i - s_f) (1 - (t - t0) / (t1 - t0))^3        s_i = 0

(Zhu and Gupta, "To prune, or not to prune", 2017, arXiv:1710.01878, equation 1.) What is pruned is 0 and stays 0: it
has no magnitude, so every later mask leaves it out, too. (In the paper's code it keeps its value, which may come back.)

An n:m pattern keeps the n largest of every m neighbours of a sum, which hardware can skip: 2:4 (Mishra et al.,
"Accelerating sparse deep neural networks", 2021).

Proved by: tests/techniques/test_sparsity_schedule.py
"""

from dataclasses import dataclass
from fractions import Fraction

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, quoted
from minidist.base.limits import whole_number


@dataclass(frozen=True)
class SparsitySchedule:
    """After `begin`, begin + every, ..., `end` steps the sparsity rises; at `end` it is `final`."""

    final: float
    begin: int
    end: int
    every: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.begin <= self.end or self.every < 1 or (self.end - self.begin) % self.every:
            raise UsageError(
                f"a sparsity schedule from step {self.begin} to {self.end} every {self.every} steps; begin at step 1 or"
                " later, end not before that, and after a multiple of the interval"
            )
        if not 0 <= self.final < 1:
            raise UsageError(f"a sparsity of {self.final:g}; it is the share of zeros, from 0 to below 1")

    def is_due(self, done: int) -> bool:
        """Return whether the sparsity rises after `done` steps."""
        return self.begin <= done <= self.end and (done - self.begin) % self.every == 0

    def at(self, done: int) -> float:
        """Return the sparsity after `done` steps: equation 1 at the last step at which it rose."""
        if done < self.begin:
            return 0.0
        if done >= self.end:
            return self.final
        t = (done - self.begin) // self.every * self.every
        return self.final - self.final * (1 - t / (self.end - self.begin)) ** 3

    def pruned(self, size: int, done: int) -> int:
        """Return how many of `size` weights are zero after `done` steps, rounded to the nearest whole number."""
        return round(self.at(done) * size)


def parse_schedule(text: str, final: float) -> SparsitySchedule:
    """Return the schedule of "BEGIN", "BEGIN,END" or "BEGIN,END,EVERY"; UsageError for another text."""
    numbers = [number for word in text.split(",") if (number := whole_number(word)) is not None]
    if not 1 <= len(numbers) == text.count(",") + 1 <= 3:
        raise UsageError(
            f"sparsity schedule {quoted(text)}; it must be BEGIN,END or BEGIN,END,EVERY in steps, such as 10,50,5"
        )
    begin, end = numbers[0], numbers[min(1, len(numbers) - 1)]
    return SparsitySchedule(final, begin, end, numbers[2] if len(numbers) == 3 else 1)


def parse_pattern(text: str) -> tuple[int, int]:
    """Return (n, m) of "n:m"; UsageError for another text."""
    n, _, m = text.partition(":")
    kept, group = whole_number(n), whole_number(m)
    if kept is None or group is None or not 1 <= kept < group:
        raise UsageError(f"sparsity pattern {quoted(text)}; it must be N:M, N kept of every M weights, such as 2:4")
    return kept, group


def pattern_mask(weight: xp.Array, n: int, m: int, axis: int) -> xp.Array:
    """Return a mask (bool) that keeps the n largest magnitudes of every m neighbours along `axis`, of equal the first.

    axis: the dim that the product sums over. Raises UsageError where m does not divide its length.
    """
    if weight.shape[axis] % m:
        raise UsageError(
            f"a weight of shape {weight.shape} has {weight.shape[axis]} inputs, which cannot be cut into groups of {m}"
            f" for the pattern {n}:{m}; use a multiple of {m}"
        )
    groups = xp.moveaxis(weight, axis, -1).reshape(-1, m)
    order = xp.argsort(-xp.absolute(groups), axis=1, kind="stable")
    mask = xp.zeros(groups.shape, bool, weight)
    xp.put_along_axis(mask, order[:, :n], True, axis=1)
    rest = [length for i, length in enumerate(weight.shape) if i != axis % weight.ndim]
    return xp.moveaxis(mask.reshape(*rest, weight.shape[axis]), -1, axis)


def pattern_sparsity(n: int, m: int) -> float:
    """Return the share of zeros of the pattern n:m."""
    return float(1 - Fraction(n, m))
