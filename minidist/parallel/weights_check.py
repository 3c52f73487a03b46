"""Refuses ranks that split a model with other weights: their shards would be those of different models.

    parallelize_module, apply_context_parallel  ──▶  hooks.model_checks  ──▶  one checksum, compared on all ranks

Proved by: tests/misuse/test_misuse.py, tests/parallel/test_tensor.py
"""

from zlib import crc32

import numpy as np

from minidist.comm.communicator import check_alike
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.module import Module
from minidist.nn.ops.in_place import sample_step


def check_weights(operation: str, module: Module, comm: Comm) -> None:
    """Raise MismatchError when a rank of `comm` has other weights, at once or with the next message. Sends nothing.

    Raises UsageError where `comm` is no communicator.
    """
    check_communicator(comm, operation)
    check_alike(comm, operation, "weights", weights_checksum(module, comm))


def weights_checksum(module: Module, comm: Comm) -> int:
    """Return a checksum of a sample of the weights that every rank must have: of all but those split over it already.

    0 where the values are not in this process's memory.
    """
    checksum, ranks = 0, set(comm.members)
    for name, parameter in module.named_parameters():
        split = parameter.layout is not None and any(len(ranks.intersection(r)) > 1 for r in parameter.layout.ranks)
        values = parameter.data
        if not split and type(values) is np.ndarray:
            sample = values.reshape(-1)[:: sample_step(values.shape)] if values.ndim else values
            checksum = crc32(sample.tobytes(), crc32(f"{name} {values.shape} {values.dtype}".encode(), checksum))
    return checksum
