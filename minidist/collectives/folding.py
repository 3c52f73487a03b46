"""How an algorithm for a power of two runs on any number of ranks: some ranks hand their part to a neighbour first.

Recursive doubling and halving pair rank r with r xor 1, r xor 2, r xor 4, ..., which needs a power of two. With n
ranks, q the largest power of two in n and e = n - q, the first 2 e ranks form pairs: the even one gives what it has to
the odd one and waits for the result; the q others work under *folded* numbers. 6 ranks, q = 4, e = 2:

    rank          0 ──▶ 1    2 ──▶ 3    4    5
    folded number       0          1    2    3

A folded number represents one or two neighbouring ranks, so a range of folded numbers is a range of ranks, and what
belongs to it lies side by side in memory.

Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004, section 4.
Proved by: tests/collectives/test_papers.py, tests/collectives/test_closed_form.py
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

Number = TypeVar("Number", int, float)


class Fold:
    """n ranks as `power` (q) folded numbers; `extra` (e) of them represent two ranks."""

    def __init__(self, ranks: int) -> None:
        self.power = 1 << (ranks.bit_length() - 1)
        self.extra = ranks - self.power

    def gives(self, rank: int) -> bool:
        """Return whether this rank hands its part to rank + 1 and waits."""
        return rank < 2 * self.extra and rank % 2 == 0

    def takes(self, rank: int) -> bool:
        """Return whether this rank works for rank - 1 too."""
        return rank < 2 * self.extra and rank % 2 == 1

    def number(self, rank: int) -> int:
        """Return the folded number of a rank (of a rank that gives: its neighbour's)."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, number: int) -> int:
        """Return the rank that works under a folded number."""
        return 2 * number + 1 if number < self.extra else number + self.extra

    def merge(self, sizes: Sequence[Number]) -> list[Number]:
        """Return the folded numbers' chunk sizes: a pair's two chunks become one."""
        e = self.extra
        return [sizes[2 * i] + sizes[2 * i + 1] for i in range(e)] + list(sizes[2 * e :])


class Place(NamedTuple):
    """A rank's part in a fold: whether it gives or takes, and its partners in rounds 1, 2, 3, ... of doubling."""

    gives: bool
    takes: bool
    partners: tuple[int, ...]


@lru_cache(2**14)
def place_of(ranks: int, rank: int) -> Place:
    """Return the part of one of `ranks` ranks; cached, because this takes as long as a short message."""
    fold = Fold(ranks)
    rounds, number = fold.power.bit_length() - 1, fold.number(rank)
    partners = tuple(fold.rank(number ^ 1 << i) for i in range(rounds))
    return Place(fold.gives(rank), fold.takes(rank), partners)


# --- how long rounds of exchanges take: the formulas of recursive doubling and halving are made of these ---


def folded_seconds(
    fold: Fold,
    before: Sequence[float],
    rounds: Sequence[tuple[int, Sequence[float]]],
    after: Sequence[float],
    alpha: float,
    beta: float,
    overhead: float = 0.0,
) -> float:
    """Return the seconds of rounds of exchanges between folded numbers v and v xor distance, where v sends bytes[v].

    rounds: (distance, bytes) of each. A folded pair has a message of before[v] bytes first and one of after[v] at the
    end. In a power of two all ranks advance together: a round is alpha + beta bytes. Otherwise folded ranks begin
    later, and an exchange ends when the port is through with both directions and the partner's message is there. A
    port is busy with a message for the overhead and its bytes.
    """
    # time[v]: when v is ready for its next round. First the message of the rank that gives to the one that takes.
    time = [alpha + beta * before[v] if v < fold.extra else 0.0 for v in range(fold.power)]
    port = list(time)  # when the in-port is free

    # In each round the in-port takes the partner's message, and the out-port sends to the partner.
    for distance, sent in rounds:
        partner = [v ^ distance for v in range(fold.power)]
        port = [
            max(time[w] + alpha + beta * sent[w], port[v] + overhead + beta * sent[w], time[v])
            for v, w in enumerate(partner)
        ]
        time = [max(port[v], time[v] + overhead + beta * sent[v]) for v in range(fold.power)]

    # Last the message back to the rank that gave.
    return max([*time, *(time[v] + alpha + beta * after[v] for v in range(fold.extra))])


def doubling_rounds(shares: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Return (distance, bytes) of each round of recursive doubling: each sends all it has, and adds its partner's."""
    rounds, distance, held = [], 1, list(shares)
    while distance < len(shares):
        rounds.append((distance, held))
        held = [held[v] + held[v ^ distance] for v in range(len(held))]
        distance *= 2
    return rounds


def halving_rounds(shares: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Return (distance, bytes) of each round of recursive halving: doubling backwards, sends and receives swapped."""
    return [(d, [held[v ^ d] for v in range(len(held))]) for d, held in reversed(doubling_rounds(shares))]
