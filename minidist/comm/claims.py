"""What a rank says of a communicator that it makes, on which all of its members must agree.

The same-numbered call of `group`, `dup` or `split` on the parent makes one communicator on all its members. Two ranks
that make it of other members, or in another order, would both be its rank 0 and take each other's messages for their
own; two that give it other labels have two communicators, and on each of them one rank waits for ever. So the claims
are compared when the communicator is made: simulated ranks look at those of the members that came before, and under MPI
each rank sends its claim to the next one in its own list:

    rank 0   group([0, 1], "a")       ── 0, 1 as "a" ──▶ rank 1
    rank 1   group([0, 1, 2], "a")    receives a claim that is unlike its own: MismatchError

Proved by: tests/comm/sim/test_misuse.py, tests/comm/mpi/test_groups.py
"""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.comm.call_site import CallSite
from minidist.core.base.errors import MismatchError, quoted


class Claim(NamedTuple):
    """What a rank says of a communicator.

    origin: the communicator and the number of the call that made this one from it, such as "world.2". All members have
    the same origin, also where their other fields differ.
    """

    origin: str
    rank: int  # world rank
    members: Sequence[int]  # world ranks
    label: str
    site: CallSite

    def agrees(self, other: "Claim") -> bool:
        """Return whether both name the same members in the same order, and the same label."""
        # Two ranges are compared at once, whatever their lengths.
        mine, theirs = self.members, other.members
        same = mine == theirs if isinstance(mine, range) and isinstance(theirs, range) else list(mine) == list(theirs)
        return same and self.label == other.label


def unlike_claims(one: Claim, two: Claim) -> MismatchError:
    """Return the error for a communicator on which two ranks do not agree."""
    if one.rank > two.rank:
        one, two = two, one
    parent, _, number = one.origin.rpartition(".")
    lines = f"{one.site}" if one.site == two.site else f"{one.site} and {two.site}"
    if one.label == two.label:
        return MismatchError(
            f"members differ: rank {one.rank} makes the communicator {one.origin}{one.label} of the world's ranks"
            f" {quoted(list(one.members))}, but rank {two.rank} makes it of {quoted(list(two.members))}, at {lines};"
            " every member must pass the same ranks in the same order"
        )
    return MismatchError(
        f"labels differ: call {number} of group, dup or split on {parent} is {_made(one)} on rank {one.rank}, but"
        f" {_made(two)} on rank {two.rank}, at {lines}; every member must make the same communicators in the same"
        " order, with the same labels"
    )


def _made(claim: Claim) -> str:
    if claim.label == "dup":
        return "dup()"
    return f"a group labelled {quoted(claim.label)} of {quoted(list(claim.members))}"
