"""What may watch the ranks that train one model. Here it watches nothing: the core runs without it.

    a wrapper is made      wraps             does it sum over the right ranks, and is the model the same on each?
    forward                forward_begins    does every rank train?
    backward               backward_begins   is every gradient reduced, and is the divisor of the loss right?
    a message              of_bucket, ...    a text that every rank must have equal, which the message compares
    the gradients are sums backward_ended    what else the ranks must have in common after a step

Each wrapper has one guard. `hooks.guards` makes it; minidist adds `replica_guard.ReplicaGuard`.

Proved by: tests/base/test_hooks.py, tests/misuse/test_misuse.py
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from minidist.core.autograd import BackwardPass, Parameter
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError, quoted
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters


class Guard:
    """Refuses nothing. op: "sum" or "avg", of the gradients. comms: over which they are summed, one after the other."""

    def __init__(self, op: str, *comms: Comm) -> None:
        self.op, self.comms = op, comms

    def wraps(self, wrapper: str, module: Any, flat: FlatParameters, settings: Mapping[str, Any], *comms: Comm) -> None:
        """A wrapper of that name is made, and has sent nothing yet; every rank must pass the same settings."""

    def shards(self, module: Any, ignored: Collection[Parameter]) -> None:
        """The module is to be sharded, but for parameters of which the user takes care."""

    def covers(self, module: Any, parameters: Iterable[Parameter]) -> None:
        """These parameters are taken care of; others of the module, or of the loss, are not."""

    def forward_begins(self, module: Any) -> None:
        """A pass through the module begins; None: through the one that is covered."""

    def backward_begins(self, running: BackwardPass, again: bool = False) -> None:
        """A pass begins whose gradients will be reduced. again: with those of an earlier pass."""

    def backward_ended(self) -> None:
        """The gradients of a pass are reduced."""

    def forget(self) -> None:
        """An error has ended the pass."""

    def of_bucket(self, bucket: Any) -> str:
        """Return what every rank must have equal where it reduces a `Bucket`."""
        return ""

    def of_weights(self, flat: FlatParameters) -> str:
        """Return what every rank must have equal where it gathers the weights."""
        return ""

    def of_unit(self, flat: FlatParameters, made: "Guard") -> str:
        """Return what every rank must have equal where it gathers or reduces a unit that `made` was told of."""
        return ""

    def of_copies(self, shard: Any, made: "Guard") -> str:
        """Return what ranks with equal copies of a `Shard` must have equal where they sum its gradient."""
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
