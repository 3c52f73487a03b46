"""The check that replicated parameters are the same on all ranks, bit for bit.

A gradient that was not summed over all ranks that use a parameter lets the replicas drift apart, while the loss keeps
falling. Comparing 8 bytes per parameter finds it in the step in which it happens.

Proved by: tests/parallel/test_tensor.py, tests/train/test_replicas.py
"""

import numpy as np

from minidist.autograd import Parameter
from minidist.base.errors import MismatchError
from minidist.base.fingerprint import fingerprint_number
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.nn.module import Module
from minidist.parallel.tensor.grad_norm import sharded_over


def check_replicas(module: Module, comm: Comm, axis: str | None = None) -> None:
    """Raise MismatchError, on every rank alike, when a replicated parameter is not bitwise the same on all ranks.

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
            raise MismatchError(
                f"replicated parameter {name!r} of shape {parameter.shape} is not the same on rank {first + place} as"
                f" on rank {first}; its gradient was not summed over all ranks that use it, or its update depends on"
                " the rank"
            )


def _replicas(parameter: Parameter, comm: Comm, axis: str | None) -> int:
    """Return how many neighbouring ranks of `comm` hold the same values."""
    axes, replicas = sharded_over(parameter)
    return comm.size if not axes or (axis is not None and axis not in axes) else replicas
