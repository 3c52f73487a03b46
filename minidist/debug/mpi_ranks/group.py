"""Groups: ordered sets of ranks.

Proved by: tests/mpi_ranks/test_program.py
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from minidist.debug.mpi_ranks.constants import IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL, failed
from minidist.debug.mpi_ranks.handle import Handle, Named


class Members(NamedTuple):
    """The world ranks of a group, in its order. me: the world rank of whoever holds it."""

    ranks: list[int]
    me: int


class Group(Handle):
    """A group of ranks."""

    held: Members | None
    named = members = Named[Members]("ERR_GROUP", "the group is GROUP_NULL")
    Free = Handle.release

    def _with(self, ranks: Sequence[int]) -> Self:
        return self.of(Members(list(ranks), self.members.me))

    def Get_size(self) -> int:
        return len(self.members.ranks)

    def Get_rank(self) -> int:
        """Return this rank's number in the group; UNDEFINED when it is no member."""
        ranks, me = self.members.ranks, self.members.me
        return ranks.index(me) if me in ranks else UNDEFINED

    size, rank = property(Get_size), property(Get_rank)

    def Translate_ranks(self, ranks: Any = None, group: Any = None) -> list[int]:
        """Return the numbers that ranks of this group have in another one."""
        if isinstance(ranks, Group):  # the older form: group1, ranks, group2
            ranks, group = group, ranks
        mine = self.members.ranks
        theirs = self.members.ranks if group is None else group.members.ranks
        chosen = range(len(mine)) if ranks is None else ranks
        place = {rank: number for number, rank in enumerate(theirs)}
        return [PROC_NULL if r == PROC_NULL else place.get(mine[self._valid(r)], UNDEFINED) for r in chosen]

    def _valid(self, rank: int) -> int:
        if not 0 <= rank < len(self.members.ranks):
            raise failed("ERR_RANK", f"rank {rank} of a group that has {len(self.members.ranks)} ranks")
        return rank

    def Compare(self, group: "Group") -> int:
        """Return IDENT, SIMILAR (the same ranks in another order) or UNEQUAL."""
        mine, theirs = self.members.ranks, group.members.ranks
        return IDENT if mine == theirs else SIMILAR if sorted(mine) == sorted(theirs) else UNEQUAL

    def Dup(self) -> Self:
        return self._with(self.members.ranks)

    @classmethod
    def Union(cls, group1: "Group", group2: "Group") -> Any:
        """Return the ranks of the first group, then those that only the second has."""
        first = group1.members.ranks
        return group1._with(first + [rank for rank in group2.members.ranks if rank not in first])

    @classmethod
    def Intersection(cls, group1: "Group", group2: "Group") -> Any:
        """Return the ranks of the first group that the second has, too."""
        return group1._with([rank for rank in group1.members.ranks if rank in group2.members.ranks])

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: "Group", group2: "Group") -> Any:
        """Return the ranks of the first group that the second does not have."""
        return group1._with([rank for rank in group1.members.ranks if rank not in group2.members.ranks])

    def Incl(self, ranks: Sequence[int]) -> Self:
        """Return the group of these ranks of this one, in their order."""
        return self._with([self.members.ranks[self._valid(rank)] for rank in ranks])

    def Excl(self, ranks: Sequence[int]) -> Self:
        """Return the group without these ranks."""
        without = {self._valid(rank) for rank in ranks}
        return self._with([rank for number, rank in enumerate(self.members.ranks) if number not in without])

    @staticmethod
    def _spread(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        return [rank for first, last, step in ranges for rank in range(first, last + (1 if step > 0 else -1), step)]

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return the group of the ranks in ranges (first, last, step)."""
        return self.Incl(self._spread(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return the group without the ranks in ranges (first, last, step)."""
        return self.Excl(self._spread(ranks))
