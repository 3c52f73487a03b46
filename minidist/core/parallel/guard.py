"""The interface of checks on the ranks that train one model. The guard of this file checks nothing.

    wraps(wrapper, module, flat, settings, *comms)   a wrapper of that name is made, and has sent nothing yet
    shards(module, ignored)                          the module is to be sharded, but for ignored parameters
    covers(module, parameters)                       these parameters are taken care of; others are not
    forward_begins(module)                           a pass through it begins; None: through the one that is covered
    backward_begins(pass, again)                     its gradients will be reduced, again: with those of an earlier one
    backward_ended(), forget()                       the gradients of a pass are reduced; an error has ended it

    of_bucket(bucket), of_weights(flat)              a text that every rank must have equal, which a message compares:
    of_unit(flat, made), of_copies(shard, made)      of a unit or a shard that the guard `made` was told of

Each wrapper has one guard. `hooks.guards` makes it; minidist adds `ReplicaGuard` of
`minidist/parallel/replica_guard.py`, whose `wraps` sends 16 B from rank 0 to each other rank (purpose `startup`).

Proved by: tests/base/test_hooks.py, tests/misuse/test_misuse.py
"""

from typing import Any

from minidist.core.base import hooks
from minidist.core.base.errors import UsageError, quoted
from minidist.core.comm import Comm


class Guard:
    """Refuses nothing. op: "sum" or "avg", of the gradients. comms: over which they are summed, one after the other."""

    def __init__(self, op: str, *comms: Comm) -> None:
        self.op, self.comms = op, comms

    def __getattr__(self, event: str) -> Any:
        """Each event of the table above does nothing, and no text must be equal."""
        if event.startswith("_"):
            raise AttributeError(event)
        return _nothing


def _nothing(*_: Any, **__: Any) -> str:
    return ""


def operation_of(reduction: str) -> str:
    """Return the operation of a collective, "avg" or "sum", for a wrapper's `reduction`, "mean" or "sum"."""
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction={quoted(reduction)}; it must be 'mean' or 'sum'")
    return "avg" if reduction == "mean" else "sum"


def new_guard(op: str, *comms: Comm) -> Guard:
    """Return the guard of one wrapper: that of the hook added last."""
    make = hooks.guards[-1] if hooks.guards else Guard
    guard: Guard = make(op, *comms)
    return guard
