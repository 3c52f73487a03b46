"""Which collective calls a rank has made on a communicator, so that calls that differ between ranks can be named.

Two unlike calls are told apart when a message of the one meets a receive of the other. But some never meet: when every
rank of a small broadcast takes itself for the root, all send, none receives, and the program goes on. So each rank also
continues a checksum of its calls (their names, reductions, roots and shapes), and under MPI every message of a call
carries two bytes of it in its header: what the sender had called before.

    rank 0   broadcast root 0 ── goes on ──▶ all_reduce ── message: the calls before it are 3f1a ──▶ rank 1
    rank 1   broadcast root 1 ── goes on ──▶ all_reduce: the calls before mine are 9c02, so they differ

The last calls are kept, with their lines, so that a report can say which one was the first that differed.

Proved by: tests/comm/test_call_log.py, tests/comm/mpi/test_failures.py
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from minidist.base.errors import quoted
from minidist.comm.call_site import CallSite
from minidist.comm.header import unlike_operations

# A collective call of a rank: how many it had made on the communicator before; the operation and what every rank must
# pass equal, "broadcast/ring root 1 [2, 3]"; the line. (A plain tuple is made in a fifth of a named one's time.)
Call = tuple[int, str, CallSite]


class CallLog:
    """A rank's collective calls on one communicator, which notes them itself: a function less on the way of each.

    count: how many. checksum: of the keys of all, in their order. recent: the last ones.
    """

    __slots__ = ("checksum", "count", "recent")

    def __init__(self, kept: int) -> None:
        self.count, self.checksum = 0, 0
        self.recent: deque[Call] = deque(maxlen=kept)


def unlike_calls(name: str, calls: Mapping[int, Iterable[Call]], ended: Collection[int] = ()) -> str:
    """Return a sentence about the first call in which ranks differ; "" when the calls that are known are alike.

    name: of the communicator. calls: the known calls of each world rank, oldest first. ended: ranks that make no more,
    so that a call that one of them has not made is a difference, too.
    """
    # By number, then by key: the ranks that made it.
    table: dict[int, dict[str, list[tuple[int, CallSite]]]] = {}
    for rank, of_rank in sorted(calls.items()):
        for number, key, site in of_rank:
            table.setdefault(number, {}).setdefault(key, []).append((rank, site))

    for number, by_key in sorted(table.items()):
        which = f"call {number} of {name}"
        if len(by_key) > 1:
            first, second, *_ = by_key
            what, remedy = unlike_operations(first, second)
            return f"{what}: {which} is {_of_each(by_key)}; {remedy}"
        made = [rank for rank, _ in next(iter(by_key.values()))]
        missing = [rank for rank in calls if rank in ended and rank not in made]
        if missing and all(number > last for rank in missing for last, *_ in calls[rank]):
            return (
                f"calls differ: {which} is {_of_each(by_key)}, and {ranks_text(missing)} made no such call; every rank"
                " of a communicator must call the same collectives in the same order"
            )
    return ""


def _of_each(by_key: Mapping[str, Sequence[tuple[int, CallSite]]]) -> str:
    """Return "broadcast root 0 on rank 0 and broadcast root 1 on ranks 1, 2, at program.py:3"."""
    sites = {str(site) for made in by_key.values() for _, site in made}
    parts = []
    for key, made in by_key.items():
        where = f" at {made[0][1]}" if len(sites) > 1 else ""
        parts.append(f"{quoted(key, marks=False)} on {ranks_text([rank for rank, _ in made])}{where}")
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return text if len(sites) > 1 else f"{text}, at {sites.pop()}"


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """Return "rank 1", or "ranks 0, 1, 2 and 5 more" of which at most `most` are listed."""
    listed = sorted(ranks)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:most]))}{more}"
