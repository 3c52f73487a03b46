"""Our solutions of lesson 19b; they are not a part of the package."""

from collections.abc import Sequence
from itertools import product


def building_block(p: int, offsets: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Try gaps at the three turns, those with the shortest lifetimes first, until no rank has two passes at once."""
    gaps = sorted(product(range(1, 7), repeat=3), key=lambda gap: gap[0] + 2 * gap[1] + gap[2])
    blocks = (_with_gaps(p, offsets, gap) for gap in gaps)
    return next(
        rows for rows in blocks if all(len({start % 6 for start in row}) == 4 for row in rows)
    )


def _with_gaps(
    p: int, offsets: tuple[int, int, int, int], gaps: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Return each rank's starts: down the ranks, after a gap up, after a gap down, after a gap up."""
    f0, f1, i1, i0 = offsets
    first, second, third = gaps
    top = f0 * (p - 1) + first  # F up starts on the last rank
    loss = top + f1 * (p - 1) + second  # I up starts on rank 0
    back = loss + i1 * (p - 1) + third  # I down starts on the last rank
    return [
        (f0 * r, top + f1 * (p - 1 - r), loss + i1 * r, back + i0 * (p - 1 - r)) for r in range(p)
    ]


SOLUTIONS = {"19b.building_block": building_block}
