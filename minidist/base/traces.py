"""What is asked of a trace outside the core: its messages without their times.

Proved by: tests/comm/test_conformance.py
"""

from typing import Any

from minidist.core.base.trace import MessageEvent, Trace


def signature(message: MessageEvent) -> tuple[Any, ...]:
    """What must be the same in the simulated world and under MPI: everything but the times."""
    where = (message.kind, message.peer, message.tag, message.nbytes)
    return (*where, message.purpose, message.operation, message.communicator)


def sequences(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """For each lane the signatures of its messages in program order: equal in every world."""
    result: dict[str, list[tuple[Any, ...]]] = {}
    for message in trace.messages:
        result.setdefault(message.lane, []).append(signature(message))
    return result
