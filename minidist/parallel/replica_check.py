"""Checks that every rank that holds a parameter, or the same part of one, holds the same bits.

Data-parallel ranks hold the same weights, tensor-parallel ranks the same norms, the first and the last stage the same
tied embedding. Nothing sends these weights again after the start: they stay equal because each rank adds the same
numbers in the same order. A mistake in that (a gradient that one axis forgot to sum) lets the replicas drift apart
while the loss keeps falling; comparing fingerprints finds it in the step in which it happens.

    check_module_replicas   a module of a user's own loop, over one axis. All ranks have its parameters in the same
                            order, so fingerprints alone are sent: 8 B per replicated parameter
    check_shard_replicas    a job in any layout (`--check-replicas`). With ZeRO and pipelines ranks hold different
                            parts, so each fingerprint travels with that of the part's name and place: 16 B per shard

Proved by: tests/parallel/test_tensor.py, tests/train/test_replicas.py
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.base.errors import MismatchError
from minidist.core.base.random import fingerprint_number
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.nn.module import Module
from minidist.parallel.tensor.full_state import MeshLike
from minidist.parallel.tensor.grad_norm import sharded_over


def check_module_replicas(module: Module, comm: Comm, axis: str | None = None) -> None:
    """Raise MismatchError, on every rank, when a replicated parameter is not bitwise the same on all ranks.

    axis: the name of `comm` in the layouts; what is sharded over another axis is then compared, too (over the data
    axis every shard is a replica). By default only what is not sharded at all. Of a shard that neighbouring ranks
    share, these are compared. Sends 8 B per parameter that is compared (an all-gather of fingerprints, purpose
    `metrics`).
    """
    if comm.size == 1:
        return

    # Every rank selects the same parameters, so the fingerprints match by position.
    compared = [(name, p, _replicas(p, comm, axis)) for name, p in module.named_parameters()]
    compared = [(name, p, replicas) for name, p, replicas in compared if replicas > 1]

    # 8 bytes per parameter, from every rank: (ranks, parameters).
    prints = np.array([fingerprint_number(p.data.tobytes()) for _, p, _ in compared], dtype=np.uint64)
    with purpose("metrics"):
        every = all_gather(comm, prints).reshape(comm.size, -1)

    # All ranks have all fingerprints, so all raise, or none does.
    for i, (name, parameter, replicas) in enumerate(compared):
        # Each row is a group of neighbours that must hold the same values.
        groups = every[:, i].reshape(-1, replicas)
        different = np.argwhere(groups != groups[:, :1])
        if different.size:
            group, place = (int(n) for n in different[0])
            first = group * replicas
            raise _mismatch(f"replicated parameter {name!r} of shape {parameter.shape}", first + place, first)


def _replicas(parameter: Parameter, comm: Comm, axis: str | None) -> int:
    """Return how many neighbouring ranks of `comm` hold the same values."""
    axes, replicas = sharded_over(parameter)
    return comm.size if not axes or (axis is not None and axis not in axes) else replicas


class ShardLike(Protocol):
    """Elements [start, stop) of a parameter (of its tensor-parallel shard), which this rank holds: `LocalShard`."""

    @property
    def parameter(self) -> Parameter: ...
    @property
    def values(self) -> Array: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def check_shard_replicas(comm: Comm, mesh: MeshLike, shards: Iterable[ShardLike], step: int) -> None:
    """Raise MismatchError, on every rank, when two ranks hold different values of one part of a tensor.

    mesh: where the axes of the layouts are found. shards: what this rank holds. step: for the message. Each rank sends
    8 B, and 16 B for every shard that it holds, to every rank (purpose `metrics`).
    """
    # One row per shard: a number made of the tensor's name and the shard's place in the tensor, and the shard's bits.
    rows, names = [], {}
    for shard in shards:
        layout = shard.parameter.layout
        # Its coordinates on the axes that cut it; ranks with copies of one shard have the same ones.
        cut = [mesh[name].rank // layout.copies for name in layout.axes] if layout is not None else []
        what = fingerprint_number(repr((shard.parameter.name, cut, shard.start, shard.stop)).encode())
        names[what] = shard.parameter.name
        rows.append([what, fingerprint_number(shard.values.tobytes())])

    # How many numbers each rank has, then the numbers.
    mine = np.array(rows, np.uint64).reshape(-1)
    with purpose("metrics"):
        counts = np.asarray(all_gather(comm, np.array([mine.size])))
        table = np.asarray(all_gather(comm, mine, counts=counts.tolist())).reshape(-1, 2)

    # All ranks compare all rows with the first rank that has the same part.
    first: dict[int, tuple[int, int]] = {}
    wrong = []
    for rank, (what, bits) in zip(np.repeat(np.arange(comm.size), counts // 2).tolist(), table.tolist(), strict=True):
        other, expected = first.setdefault(what, (rank, bits))
        if bits != expected:
            wrong.append((what, other, rank))
    if wrong:
        what, other, rank = wrong[0]
        part = f"parameter {names[what]!r}" if what in names else "a parameter of another stage or shard"
        raise _mismatch(f"after step {step} {part}", rank, other, f" ({len(wrong)} such parts in all)")


def _mismatch(what: str, rank: int, other: int, more: str = "") -> MismatchError:
    return MismatchError(
        f"{what} is not the same on rank {rank} as on rank {other}{more}; its gradient was not summed over all ranks"
        " that use it, or its update depends on the rank"
    )
