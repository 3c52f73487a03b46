"""Host memory as a slow second floor: optimizer state, or activations, live there and cross a link when needed.

    device   gradient shard ──4 B an element──▶ host   the optimizer's step, on its own copy of the parameters
    device   parameters     ◀──4 B an element── host   (in 16-bit training 2 + 2 bytes: ZeRO-Offload, section 4)

With NumPy there is only one memory, so device and host are two accounts: what is on the host is counted in the pool's
account and not in the device's, every crossing is a real copy, and takes bytes / bandwidth on the virtual clock. Nothing
overlaps a crossing here; hiding it behind computation is the next step. The arithmetic is the same, and so are the bits.
Sources: Ren et al., "ZeRO-Offload", USENIX ATC 2021; activations: Rajbhandari et al., ZeRO, SC 2020, section 6.1 (P_a+cpu).
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.memory import MemoryAccount, memory_account, track
from minidist.comm import Comm
from minidist.optim import Optimizer, ParameterSlice
from minidist.optim.slices import as_slices


class HostPool:
    """A rank's host memory and the link to it.

    bandwidth: bytes a second each way, on the virtual clock. account: what lives here. to_host, to_device: bytes that
    have crossed.
    """

    def __init__(self, comm: Comm, bandwidth: float = 16e9) -> None:
        if bandwidth <= 0:
            raise UsageError(f"the link to the host has {bandwidth:g} bytes a second; it must be above 0")
        self.comm, self.bandwidth = comm, bandwidth
        self.account = MemoryAccount()
        self.to_host = self.to_device = 0

    @contextmanager
    def on_host(self):  # type: ignore[no-untyped-def]
        """What is allocated in the block lives on the host."""
        token = memory_account.set(self.account)
        try:
            yield
        finally:
            memory_account.reset(token)

    def store(self, array: xp.Array, purpose: str, out: xp.Array | None = None) -> xp.Array:
        """Copy a device array to the host (into `out`, a host array)."""
        if out is None:
            out = self.account.track(xp.empty_like(array), purpose)
        xp.copyto(out, array)
        self.to_host += array.nbytes
        self._cross(array.nbytes)
        return out

    def fetch(self, array: xp.Array, purpose: str, out: xp.Array | None = None) -> xp.Array:
        """Copy a host array to the device (into `out`, a device array)."""
        if out is None:
            out = track(xp.empty_like(array), purpose)
        xp.copyto(out, array)
        self.to_device += array.nbytes
        self._cross(array.nbytes)
        return out

    def _cross(self, nbytes: int) -> None:
        self.comm.compute(seconds=nbytes / self.bandwidth, name="offload")


class OffloadedOptimizer:
    """`optimizer_class` on host copies of the slices `parameters`; state, copies and gradient buffers are the pool's.

    A step sends the gradients of this rank's elements to the host, and their new values back. Otherwise it is the
    wrapped optimizer: `state`, `step_count`, `lr_factor`, `load_state_dict` are its own.
    """

    def __init__(self, parameters: Any, optimizer_class: Callable[..., Optimizer], pool: HostPool, **settings: Any) -> None:
        self.pool = pool
        self.device = list(as_slices(parameters))
        host = []
        with pool.on_host():
            for piece in self.device:
                # The first copy of the values is part of the start, not of a step.
                host.append(ParameterSlice(track(xp.array(piece.data.reshape(-1)), "parameter"), None, piece.name))
            self.optimizer = optimizer_class(host, **settings)
        self.host = host
        self.buffers: list[xp.Array | None] = [None] * len(host)

    def step(self) -> None:
        """Gradients down, the step on the host, parameters up."""
        owners: dict[int, Any] = {}
        for i, (near, far) in enumerate(zip(self.device, self.host, strict=True)):
            far.grad = None
            if near.grad is not None:
                far.grad = self.buffers[i] = self.pool.store(near.grad.reshape(-1), "gradient", self.buffers[i])
        with self.pool.on_host():
            self.optimizer.step()
        for near, far in zip(self.device, self.host, strict=True):
            if far.grad is not None:
                self.pool.fetch(far.data, "parameter", near.data.reshape(-1))
                owner = getattr(near, "source", near)
                owners[id(owner)] = owner
        for owner in owners.values():
            owner.updated()

    def refresh(self) -> None:
        """The parameters on the device were changed (loaded): copy them to the host again."""
        for near, far in zip(self.device, self.host, strict=True):
            self.pool.store(near.data.reshape(-1), "parameter", far.data)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """As the wrapped optimizer's, onto the host."""
        with self.pool.on_host():
            self.optimizer.load_state_dict(saved)

    @property
    def lr_factor(self) -> float:
        """What multiplies the learning rate."""
        return self.optimizer.lr_factor

    @lr_factor.setter
    def lr_factor(self, value: float) -> None:
        self.optimizer.lr_factor = value

    @property
    def grad_scale(self) -> float:
        """What the next step multiplies the gradients by."""
        return self.optimizer.grad_scale

    @grad_scale.setter
    def grad_scale(self, value: float) -> None:
        self.optimizer.grad_scale = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class HostCopy:
    """An array that waits on the host until it is read: what `checkpoint(..., pack=)` keeps instead of an input."""

    def __init__(self, array: xp.Array, pool: HostPool) -> None:
        self.pool, self.array = pool, pool.store(array, "activation")

    @property
    def data(self) -> xp.Array:
        """A copy on the device."""
        return self.pool.fetch(self.array, "activation")
