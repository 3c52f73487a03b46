"""Which rank waits for which: the facts of a deadlock report, in either world.

Proved by: tests/comm/sim/test_world.py, tests/comm/mpi/test_failures.py
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from minidist.base.errors import reason
from minidist.comm.call_site import CallSite


@dataclass(frozen=True)
class Waiting:
    """A blocked stream of a rank: `peers` are the world ranks that could end its wait."""

    rank: int
    stream: str
    peers: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        stream = "" if self.stream == "main" else f" ({self.stream})"
        return f"rank {self.rank}{stream} waits in {without_checksums(self.what)}"


def without_checksums(text: str) -> str:
    """Return an operation's text without the checksums by which ranks find a difference: no rank has found one."""
    return re.sub(r", checksum of the \w+ [0-9a-f]{8}", "", text)


def error_line(error: BaseException | None) -> str:
    """Return an exception, its text and the line that raised it, as one line."""
    # The innermost frame of the traceback is where it was raised.
    assert error is not None
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f", raised at {CallSite(last.tb_frame.f_code.co_filename, last.tb_lineno)}" if last is not None else ""
    return f"{reason(error, named=True)}{where}"


MAX_CIRCLE = 20  # ranks that are listed


def circle_text(cycle: Sequence[int], arrow: str = " -> ", word: str = "rank ") -> str:
    """Return "rank 0 -> rank 1 -> rank 0"; of a long circle the first ranks, how many more there are, and the last."""
    names, more = [f"{word}{rank}" for rank in cycle], len(cycle) - MAX_CIRCLE
    if more > 0:
        names[MAX_CIRCLE - 1 : -1] = [f"... {more:,} more ..."]
    return arrow.join([*names, names[0]])


def find_cycle(waiting: list[Waiting]) -> list[int]:
    """Return a circle of ranks in which each waits for the next, or []. Starts at its smallest rank.

    A rank with several streams may wait for several ranks at once, and each of them may be the one in the circle.
    """
    # An edge for each wait that one rank alone could end. A receive from any rank has no such edge.
    edges = [(w.rank, w.peers[0]) for w in waiting if len(w.peers) == 1]
    graph: TopologicalSorter[int] = TopologicalSorter({rank: () for rank, _ in sorted(edges)})
    for rank, peer in edges:
        graph.add(peer, rank)
    try:
        graph.prepare()
    except CycleError as error:
        circle: list[int] = error.args[1][:-1]
        smallest = circle.index(min(circle))
        return circle[smallest:] + circle[:smallest]
    return []
