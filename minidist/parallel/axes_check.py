"""Checks, before anything is sent, that a wrapper sums gradients over the right ranks.

A model may be split over one axis of a mesh before a wrapper sums its gradients over another. Two mistakes in this
leave every message well formed, and the loss falls:

    over too many ranks   DistributedDataParallel(model, mesh["tp"]): shards of different columns would be averaged
    over too few ranks    DistributedDataParallel(model, mesh["dp"]) with context parallelism: the ranks of `cp` see
                          different tokens, and their gradients would never be added

Proved by: tests/misuse/test_misuse.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Parameter
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.module import Module


def check_axes(wrapper: str, module: Any, parameters: Iterable[Parameter], *comms: Comm | None) -> None:
    """Raise UsageError when summing the gradients of `parameters` over `comms` cannot be right. Sends nothing.

    wrapper: its name, for the message. module: what the parameters belong to, if it is known. comms: the communicators
    along which the wrapper sums; hybrid sharding has two.
    """
    over = [comm for comm in comms if comm is not None]
    for comm in over:
        check_communicator(comm, wrapper)
    mine, members = over[0], {rank for comm in over for rank in comm.members}

    # Shards of one tensor have nothing in common, so there is nothing to sum. Most parameters are cut the same way.
    seen = set()
    for parameter in parameters:
        layout = parameter.layout
        cuts = () if layout is None else zip(layout.axes, layout.ranks, strict=False)
        for axis, ranks in cuts:
            if (axis, ranks) in seen:
                continue
            seen.add((axis, ranks))
            if len(members.intersection(ranks)) > 1:
                raise UsageError(
                    f"rank {mine.members[mine.rank]}: {wrapper} over ranks {quoted(sorted(members))} would sum"
                    f" parameter {parameter.name!r} with other shards of axis {axis!r} (ranks {quoted(list(ranks))}),"
                    " which hold other rows or columns; pass the data-parallel axis instead, such as mesh['dp'], or"
                    " leave the wrapper out"
                )

    # Attention that is split over the sequence: every rank of its axis has only the gradient of that rank's tokens.
    for part in module.modules() if isinstance(module, Module) else ():
        attention = getattr(part, "attention_fn", None)
        split_over = getattr(attention, "sequence_comm", None)
        if split_over is not None and not members.issuperset(split_over.members):
            raise UsageError(
                f"rank {mine.members[mine.rank]}: {wrapper} over ranks {quoted(sorted(members))} of a model with"
                f" context parallelism over ranks {quoted(list(split_over.members))}: the gradients of the ranks of"
                " axis 'cp', which see other tokens, would never be added; pass both axes: mesh['dp', 'cp'], which"
                " gradient_axes(mesh) returns"
            )
