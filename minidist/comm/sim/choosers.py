"""Which of several waiting messages a wildcard receive gets. Under MPI the first to arrive, so runs differ.

In the simulated world the choice is made when no stream can run any further, one match at a time, by a *chooser*: a
function from the list of candidates to the index of one. So the same program can be run in its most likely order, in a
random but repeatable one, in every possible one, or in the very order that a real run took.

Proved by: tests/comm/sim/test_choosers.py
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from minidist.base.traces import Trace
from minidist.comm.sim.watched import Candidate, Chooser, earliest
from minidist.core.base.errors import MismatchError

__all__ = ["Candidate", "Chooser", "earliest", "explore", "replay", "seeded"]

T = TypeVar("T")


def seeded(seed: int) -> Chooser:
    """Return a chooser of a random order, the same for the same seed."""
    generator = random.Random(seed)
    return lambda candidates: generator.randrange(len(candidates))


def replay(traces: Sequence[Trace]) -> Chooser:
    """Return a chooser of a recorded run's order: each wildcard receive gets the sender that it got there."""
    # The senders of each receiver's wildcards, in the order in which it got them.
    recorded: dict[tuple[int, str, int], deque[int]] = defaultdict(deque)  # by receiver, context, tag
    for trace in traces:
        for message in trace.messages:
            if message.wildcard and message.peer >= 0:
                context = message.communicator + ("" if message.operation == "message" else "/collectives")
                recorded[trace.rank, context, message.tag].append(message.peer)

    def choose(candidates: Sequence[Candidate]) -> int:
        # Any candidate that was next in the recorded run will do: the queues do not influence each other.
        for index, candidate in enumerate(candidates):
            queue = recorded[candidate.receiver, candidate.context, candidate.tag]
            if queue and queue[0] == candidate.sender:
                queue.popleft()
                return index

        # No candidate was next anywhere: this is another program, or another number of ranks.
        wanted = {receiver: queue[0] for (receiver, _, _), queue in recorded.items() if queue}
        raise MismatchError(
            f"the recorded run cannot be replayed: its next messages are {wanted} (receiver: sender), "
            f"but the waiting messages are {[(c.receiver, c.sender) for c in candidates]}; "
            "replay the same program on the same number of ranks"
        )

    return choose


def explore(run: Callable[[Chooser], T], limit: int = 100_000) -> Iterator[T]:
    """Yield `run(chooser)` for every possible order, once each, depth first over the tree of choices.

    `run` builds a fresh world with the chooser that it is given, runs it and returns what the caller wants to look at.
    """
    # Each run is one path from the root of the tree to a leaf. `path` says where to go; the run itself says, choice by
    # choice, how many branches there are.
    path: list[int] = []  # the choice taken at each depth of the run
    for _ in range(limit):
        widths: list[int] = []  # how many candidates there were at each depth

        def choose(candidates: Sequence[Candidate], widths: list[int] = widths) -> int:
            # Follow the path; beyond its end take the first branch.
            depth = len(widths)
            widths.append(len(candidates))
            if depth == len(path):
                path.append(0)
            return path[depth]

        yield run(choose)

        # The next leaf of the tree: the last choice that has another candidate takes it.
        while path and path[-1] + 1 >= widths[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1
    raise RuntimeError(f"more than {limit} orders; make the case smaller or raise explore(limit=...)")
