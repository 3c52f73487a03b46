"""How an algorithm for a power of two runs on any number of ranks: some ranks hand their part to a neighbour first.

Recursive doubling and halving pair rank r with r xor 1, r xor 2, r xor 4, ..., which needs a power of two. With n
ranks, q the largest power of two in n and e = n - q, the first 2 e ranks form pairs: the even one gives what it has to
the odd one and waits for the result; the q others work under *folded* numbers. 6 ranks, q = 4, e = 2:

    rank          0 ──▶ 1    2 ──▶ 3    4    5
    folded number       0          1    2    3

A folded number stands for one or two neighbouring ranks, so a range of folded numbers is a range of ranks, and what
belongs to it lies side by side in memory.

Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004, section 4.
"""

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


class Fold:
    """n ranks as `power` (q) folded numbers; `extra` (e) of them stand for two ranks."""

    def __init__(self, ranks: int) -> None:
        self.power = 1 << (ranks.bit_length() - 1)
        self.extra = ranks - self.power

    def gives(self, rank: int) -> bool:
        """Does this rank hand its part to rank + 1 and wait?"""
        return rank < 2 * self.extra and rank % 2 == 0

    def takes(self, rank: int) -> bool:
        """Does this rank work for rank - 1 too?"""
        return rank < 2 * self.extra and rank % 2 == 1

    def number(self, rank: int) -> int:
        """The folded number of a rank (of a rank that gives: its neighbour's)."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, number: int) -> int:
        """The rank that works under a folded number."""
        return 2 * number + 1 if number < self.extra else number + self.extra

    def merge(self, sizes: Sequence[Number]) -> list[Number]:
        """Chunk sizes of the ranks to chunk sizes of the folded numbers."""
        e = self.extra
        return [sizes[2 * i] + sizes[2 * i + 1] for i in range(e)] + list(sizes[2 * e :])
