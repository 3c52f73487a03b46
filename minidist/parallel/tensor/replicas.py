"""Two things that must see the whole model although each rank has tiles: the gradient norm, and the replicas' equality.

A norm adds each global element once: tiles are summed over the ranks, replicated parameters counted on one of them.
(Counting the latter once a rank, or clipping by the norm of a rank's own tiles, are known bugs: every rank then scales
by another number, and the replicas drift apart.)
"""

import hashlib
import math

import numpy as np

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.errors import MismatchError
from minidist.base.trace import purpose
from minidist.collectives import all_gather, all_reduce
from minidist.comm import Comm
from minidist.nn.module import Module
from minidist.optim.clip import clip_coefficient, scale_gradients_


def clip_grad_norm_(module: Module, max_norm: float, comm: Comm) -> float:
    """Scale all gradients so that the norm of the *global* gradient is at most max_norm; returns the norm before.

    comm: the axis over which the module is cut. Sends an all-reduce of one float64 (purpose `clip_norm`).
    """
    tiles = np.zeros(1)
    replicated = 0.0
    for parameter in module.parameters():
        if parameter.grad is not None:
            grad = xp.as_array(parameter.grad, xp.float64).reshape(-1)
            square = float(grad @ grad)
            if _is_cut(parameter):
                tiles += square
            else:
                replicated += square
    if comm.size > 1:
        with purpose("clip_norm"):
            all_reduce(comm, tiles)
    norm = math.sqrt(float(tiles[0]) + replicated)
    scale_gradients_(list(module.parameters()), clip_coefficient(norm, max_norm))
    return norm


def check_replicas(module: Module, comm: Comm) -> None:
    """Raise MismatchError, on every rank alike, when a replicated parameter is not bitwise the same on all ranks.

    Sends 8 B for each replicated parameter (an all-gather of fingerprints, purpose `metrics`).
    """
    replicas = [(name, p) for name, p in module.named_parameters() if not _is_cut(p)]
    prints = np.array([_fingerprint(p) for _, p in replicas], dtype=np.uint64)
    with purpose("metrics"):
        every = all_gather(comm, prints).reshape(comm.size, -1)
    for i, (name, parameter) in enumerate(replicas):
        different = np.flatnonzero(every[:, i] != every[0, i])
        if different.size:
            raise MismatchError(
                f"replicated parameter {name!r} of shape {parameter.shape} is not the same on rank {int(different[0])} as on "
                "rank 0; its gradient was not summed over all ranks that use it, or its update depends on the rank"
            )


def _fingerprint(parameter: Parameter) -> int:
    return int.from_bytes(hashlib.blake2b(parameter.data.tobytes(), digest_size=8).digest(), "little")


def _is_cut(parameter: Parameter) -> bool:
    return parameter.layout is not None and bool(parameter.layout.axes)
