"""The settings of a parameter server, above all how far a worker may run ahead: bsp, bounded delay, ssp, asp.

    a worker that has pushed c times may start clock c when  c - reached <= bound
    reached     bsp, delay    the updates that the server has made (one per clock)
                ssp, asp      the pushes of the slowest worker

Waiting less gives more steps per second, and gradients computed with older weights.

Proved by: tests/parallel/test_parameter_server.py
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from minidist.core.base.errors import UsageError, quoted
from minidist.core.optim import Optimizer
from minidist.optim import ParameterSlice


class Consistency(NamedTuple):
    """How far a worker may run ahead (`bound` clocks), and whether a clock's gradients are one update (`aggregate`)."""

    bound: float
    aggregate: bool


def parse_consistency(text: str) -> Consistency:
    """Return the consistency that a text such as "bsp", "asp", "ssp:2" or "delay:3" names."""
    name, _, number = text.partition(":")
    # bsp is delay:0, asp is ssp without a bound.
    if text in ("bsp", "asp"):
        return Consistency(0, True) if text == "bsp" else Consistency(inf, False)
    if name not in ("ssp", "delay") or not re.fullmatch("-?[0-9]{1,18}", number):
        raise UsageError(
            f"consistency {quoted(text)}; it must be bsp, asp, ssp:S or delay:T, with a number of clocks S, T"
        )
    if int(number) < 0:
        raise UsageError(
            f"consistency {quoted(text)} has the bound {number}; it must be at least 0 clocks (0: wait for all)"
        )
    return Consistency(int(number), name == "delay")


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one run with servers.

    servers: how many of the ranks, the first ones, are servers. consistency: see `parse_consistency`. optimizer: makes
    each server's optimizer from its slices. sparse: keys of matrices whose touched rows alone are pushed.
    staleness_aware: the learning rate of an update is divided by the number of updates that its worker had not seen
    (asp and ssp). rate(clock): factor of the learning rate of an update of that clock. clip: the largest norm of an
    update's gradient; one server has the whole gradient, and of several each knows a part. push: what compresses
    gradients on a rank, a `PushCompression`; None: they are pushed as they are.
    """

    servers: int
    consistency: str
    optimizer: Callable[[Sequence[ParameterSlice]], Optimizer]
    sparse: frozenset[str] = field(default_factory=frozenset)
    staleness_aware: bool = False
    rate: Callable[[int], float] = lambda clock: 1.0
    clip: float | None = None
    push: Any = None

    @property
    def is_data_parallel(self) -> bool:
        """Whether each update is one of data parallelism: of a whole clock, with gradients as they are."""
        return self.consistency == "bsp" and self.push is None
