"""Sends and receives that have been posted and have not met: queues, first in, first out, by who, whom and tag."""

from collections import deque
from typing import Any

from minidist.comm.sim.choosers import Candidate
from minidist.comm.sim.request import SimRequest

Key = tuple[str, int, int, int]  # context, source, destination (world ranks), tag
Wild = tuple[str, int, int]  # context, destination, tag: a receive from any rank


def append(queues: dict[Any, deque[SimRequest]], key: Any, request: SimRequest) -> None:
    """Last in the queue of `key`."""
    queue = queues.get(key)
    if queue is None:
        queue = queues[key] = deque()
    queue.append(request)


def take(queues: dict[Any, deque[SimRequest]], key: Any) -> SimRequest:
    """The oldest; no empty queue stays behind."""
    queue = queues[key]
    request = queue.popleft()
    if not queue:
        del queues[key]
    return request


def remove(queues: dict[Any, deque[SimRequest]], key: Any, request: SimRequest) -> None:
    """This one, wherever it stands; no empty queue stays behind."""
    queue = queues[key]
    queue.remove(request)
    if not queue:
        del queues[key]


def behind_wildcard(wildcards: dict[Wild, deque[SimRequest]], receive: SimRequest, key: Key) -> bool:
    """Was a wildcard receive for the same messages posted before `receive`? Then it chooses first."""
    context, _, destination, tag = key
    earlier = wildcards.get((context, destination, tag))
    return earlier is not None and earlier[0].order < receive.order


def candidates(
    sends: dict[Key, deque[SimRequest]], wildcards: dict[Wild, deque[SimRequest]]
) -> list[tuple[Candidate, Key]]:
    """Every match of a wildcard receive that there could be now, sorted: not in the order of the schedule."""
    found = []
    for key, queue in sends.items():
        context, source, destination, tag = key
        receives = wildcards.get((context, destination, tag))
        if receives is not None:
            time = max(queue[0].arrival, receives[0].posted)
            found.append((Candidate(time, destination, source, context, tag), key))
    return sorted(found)
