"""Where new arrays are made: on the host, on a GPU, or nowhere (a dry run).

    with creating_on(cuda()):        # arrays.empty, zeros, ... and initial weights are CuPy arrays
        model = GPT(...)

Everything that a program computes follows from its parameters and its inputs, so this is all that it takes to run on a
device: arrays that are made like another one are where that one is.

Proved by: tests/cupy/test_device.py, tests/base/test_meta.py
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from minidist.base.arrays import Device, to_host
from minidist.base.errors import UsageError, quoted, reason
from minidist.core.base.arrays import Array, creating, is_meta


@contextmanager
def creating_on(device: Device | None) -> Iterator[None]:
    """In the block, arrays that are created without another one to be like are on this device."""
    token = creating.set(np if device is None else device)
    try:
        yield
    finally:
        creating.reset(token)


def device_of(name: str) -> Device | None:
    """Return the device that --device names: cpu (None) or cuda; UsageError for another name."""
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device {quoted(name)}; it must be cpu or cuda")
    return None if name == "cpu" else cuda()


def moved(value: Array, device: Device | None) -> Array:
    """Return an array on a device (None: the host), itself when it is there; on `NoDevice` without values.

    Errors: UsageError for a meta array that is to have values.
    """
    if device is not None and getattr(device, "is_meta", False):
        return device.empty(value.shape, value.dtype)  # type: ignore[no-any-return]
    if is_meta(value):
        raise UsageError(f"a meta array of shape {value.shape} has no values to move; make it on the device instead")
    return to_host(value) if device is None else device.asarray(value)  # type: ignore[no-any-return]


# What a launcher calls the number of a process on its node: MPICH and Intel MPI, Open MPI, MVAPICH, Slurm.
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def cuda() -> Device:
    """Return the CUDA device of this process; UsageError where CuPy is not installed or sees no GPU.

    Processes that a launcher started on one node take its GPUs in turn; simulated ranks share the first one.
    """
    try:
        import cupy
    except ImportError as error:
        raise UsageError(
            f"--device cuda needs CuPy ({reason(error)}); install it with: pip install 'minidist[cuda]'"
        ) from None
    if not cupy.cuda.is_available():
        raise UsageError("--device cuda: CuPy sees no GPU; check the driver, or leave out --device")
    number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    if number.isdecimal():
        cupy.cuda.Device(int(number) % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy  # type: ignore[no-any-return]
