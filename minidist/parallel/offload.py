"""Host memory as a slow second floor: optimizer state, activations, or shards live there and cross a link when needed.

    device   gradients  ──2 B an element in 16-bit training, 4 in float32──▶ host   the optimizer's step, piece by piece
    device   parameters ◀──as many──────────────────────────────────────── host

The link carries both directions at once, each in a lane of its own, so a crossing is hidden behind whatever computes in
the
meantime: the optimizer steps one piece while the next one comes down and the one before goes up; a block's input leaves
while the next block computes, and comes back one block early (`host.HostCopy`). The arithmetic is the same, and so are
the bits. Sources: Ren et al., "ZeRO-Offload", USENIX ATC 2021 (2 M + 2 M bytes a step, section 4; overlap, section
4.2);
activations: Rajbhandari et al., ZeRO, SC 2020, section 6.1 (P_a+cpu).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import MinidistError
from minidist.optim import Optimizer
from minidist.optim.slices import as_slices
from minidist.parallel.host_pool import HostPool, Transfer


class HostOptimizer:
    """An optimizer of slices that live in `pool` already (see `CPUOffloadPolicy`): its state is counted there, too.

    `state`, `step_count`, `lr_factor`, `grad_scale` and all the rest are the wrapped optimizer's.
    """

    def __init__(self, optimizer: Optimizer, pool: HostPool) -> None:
        self.optimizer, self.pool = optimizer, pool

    def step(self) -> None:
        """The wrapped optimizer's step."""
        with self.pool.on_host():
            self.optimizer.step()
        self.pool.step_of(sum(run.slice.data.nbytes for run in self.optimizer._runs))

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


class HostSlice:
    """A slice's copy on the host, as an optimizer sees it. Reading `grad` waits for the gradient, not for those behind
    it.
    """

    def __init__(self, owner: "OffloadedOptimizer", index: int, data: xp.Array, name: str) -> None:
        self._owner, self._index, self.data, self.name = owner, index, data, name

    @property
    def grad(self) -> xp.Array | None:
        """The gradient that came down for this step; None when the device has none."""
        return self._owner.arrived(self._index)


class OffloadedOptimizer(HostOptimizer):
    """`optimizer_class` on host copies of the slices `parameters`; state, copies and gradient buffers are the pool's.

    A step sends the gradients of this rank's elements to the host, and their new values back, 2 or 4 bytes an element
    as their dtype has. Slice i steps while the gradient of slice i+1 comes down and the values of slice i-1 go up.
    Otherwise it
    is the wrapped optimizer: `state`, `step_count`, `lr_factor`, `load_state_dict` are its own.
    """

    def __init__(
        self, parameters: Any, optimizer_class: Callable[..., Optimizer], pool: HostPool, **settings: Any
    ) -> None:
        self.pool = pool
        self.device = list(as_slices(parameters))
        self._coming: dict[int, Transfer] = {}
        self._going: dict[int, Transfer] = {}
        self._stepping: int | None = None
        self.host = [
            HostSlice(self, i, pool.copy(piece.data.reshape(-1), "parameter"), piece.name)
            for i, piece in enumerate(self.device)
        ]
        with pool.on_host():
            self.optimizer = optimizer_class(self.host, **settings)
        self.buffers: list[xp.Array | None] = [None] * len(self.host)

    def step(self) -> None:
        """Gradients down, the step on the host, parameters up; the three overlap."""
        for i, near in enumerate(self.device):
            grad = near.grad
            if grad is not None:
                crossing = self.pool.start_store(grad.reshape(-1), "gradient", self.buffers[i])
                self._coming[i], self.buffers[i] = crossing, crossing.target
        moved = list(self._coming)
        with self.pool.on_host():
            self.optimizer.step()
            self._stepped()
        for crossing in [*self._coming.values(), *self._going.values()]:
            crossing.wait()
        self._coming, self._going = {}, {}
        owners: dict[int, Any] = {}
        for i in moved:
            owner = getattr(self.device[i], "source", self.device[i])
            owners[id(owner)] = owner
        for owner in owners.values():
            if hasattr(owner, "updated"):
                owner.updated()

    def arrived(self, index: int) -> xp.Array | None:
        """The optimizer asks for a gradient: it is done with the slice before, whose values may leave."""
        self._stepped()
        if index not in self._coming:
            return None
        if index in self._going:
            raise MinidistError(
                f"the gradient of {self.host[index].name!r} is read again after its values have left the host"
            )
        self._stepping = index
        return self._coming[index].wait()

    def _stepped(self) -> None:
        index, self._stepping = self._stepping, None
        if index is not None:
            near, far = self.device[index], self.host[index]
            self.pool.step_of(far.data.nbytes)
            self._going[index] = self.pool.start_fetch(far.data, "parameter", near.data.reshape(-1))

    def refresh(self) -> None:
        """The parameters on the device were changed (loaded): copy them to the host again."""
        for near, far in zip(self.device, self.host, strict=True):
            self.pool.store(near.data.reshape(-1), "parameter", far.data)


@dataclass(frozen=True)
class CPUOffloadPolicy:
    """For `fully_shard(offload_policy=)`: shards of parameters and gradients live in `pool`.

    A shard goes up before its unit is gathered, the reduced gradient comes down after its reduction. The optimizer
    works on host arrays; step it inside `pool.on_host()`, so that its state is counted there.
    """

    pool: HostPool
