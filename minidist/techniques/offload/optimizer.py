"""An optimizer on the host: its state lives there, and gradients and parameters cross the link in every step.

    device   [1] gradients  ──2 B per element in half precision, 4 in float32──▶ host   [2] the step, slice by slice
    device   [3] parameters ◀──as many────────────────────────────────────────── host

The link carries both directions at once, each in a separate stream, so a transfer is hidden behind whatever computes
in the meantime: the optimizer steps one slice while the next gradient comes and the values before go back. The
arithmetic is the same, and so are the bits.

Source: Ren et al., "ZeRO-Offload", USENIX ATC 2021 (2 M + 2 M bytes per step, section 4; overlap, section 4.2).
Proved by: tests/techniques/test_offload.py
"""

from collections.abc import Callable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.errors import MinidistError, UsageError
from minidist.core.optim import Optimizer
from minidist.core.optim.optimizer import as_slices, have_gradient
from minidist.optim import LayerwiseOptimizer, Muon
from minidist.optim.checks import check_optimizer_class
from minidist.optim.wrapper import OptimizerWrapper
from minidist.parallel.host_pool import HostPool, Transfer


class HostOptimizer(OptimizerWrapper):
    """An optimizer of slices that live in `pool` already (see `CPUOffloadPolicy`): its state is counted there, too.

    `state`, `step_count`, `lr_factor`, `grad_scale` and every other attribute are the wrapped optimizer's.
    """

    def __init__(self, optimizer: Optimizer, pool: HostPool) -> None:
        self.optimizer, self.pool = optimizer, pool

    def step(self) -> None:
        """Make the wrapped optimizer's step, and let the time pass that it takes in host memory."""
        with self.pool.on_host():
            self.optimizer.step()

        # The step reads and writes host memory, which takes time on the virtual clock.
        self.pool.step_of(sum(run.slice.data.nbytes for run in self.optimizer._runs))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state into host memory."""
        with self.pool.on_host():
            self.optimizer.load_state_dict(saved)


class HostSlice:
    """A slice's copy on the host, as an optimizer sees it. Reading `grad` waits for this gradient and for no later.

    source: the owner of the slice on the device, which knows whether its gradients are those of all ranks. parameter:
    whose owner knows whether it has a gradient.
    """

    def __init__(self, owner: "OffloadedOptimizer", index: int, data: xp.Array, name: str) -> None:
        self._owner, self._index, self.data, self.name = owner, index, data, name
        piece = owner.device[index]
        self.source, self.parameter = getattr(piece, "source", piece), getattr(piece, "parameter", None)

    @property
    def grad(self) -> xp.Array | None:
        """The gradient that came to the host for this step; None when the device has none."""
        return self._owner.gradient_of(self._index)


class OffloadedOptimizer(HostOptimizer):
    """`optimizer_class` on host copies of the slices `parameters`; state, copies and gradient buffers are the pool's.

    A step sends the gradients of this rank's elements to the host, and their new values back, 2 or 4 bytes per element
    as their dtype has. Slice i steps while the gradient of slice i+1 comes and the values of slice i-1 go back.
    """

    def __init__(
        self, parameters: Any, optimizer_class: Callable[..., Optimizer], pool: HostPool, **settings: Any
    ) -> None:
        check_optimizer_class("OffloadedOptimizer", optimizer_class, "parameters, {}, pool")

        # The slices on the device, and the transfers of the step that is under way, by index.
        self.device = list(as_slices(parameters))
        self._coming: dict[int, Transfer] = {}
        self._going: dict[int, Transfer] = {}
        self._stepping: int | None = None

        # Their copies on the host, which the optimizer steps instead, with its state next to them.
        self.host = [
            HostSlice(self, i, pool.copy(piece.data.reshape(-1), "parameter"), piece.name)
            for i, piece in enumerate(self.device)
        ]
        with pool.on_host():
            optimizer = optimizer_class(self.host, **settings)

        # Trust ratios and Muon need all gradients before the first step, and here they come one after the other.
        if isinstance(optimizer, LayerwiseOptimizer | Muon):
            raise UsageError(
                f"{type(optimizer).__name__} reads every gradient twice, for whole layers and for its step, and the"
                " offloaded optimizer has each of them once; offload an optimizer that works element by element, or"
                " nothing"
            )
        super().__init__(optimizer, pool)
        self.buffers: list[xp.Array | None] = [None] * len(self.host)  # of the gradients, kept from step to step

    def step(self) -> None:
        """Gradients to the host, the step there, parameters back; the three overlap."""
        # [1] All gradients start at once; they arrive one after the other, in the order of the slices.
        for i, (near, far) in enumerate(zip(self.device, self.host, strict=True)):
            if have_gradient(far.source, [far.parameter])[0]:
                transfer = self.pool.start_store(near.grad.reshape(-1), "gradient", self.buffers[i])
                self._coming[i], self.buffers[i] = transfer, transfer.target

        # [2] The wrapped optimizer reads each slice's gradient when it gets there: see `gradient_of`, which does [3].
        with self.pool.on_host():
            self.optimizer.step()
            self._send_stepped()

        # Values that are still on their way back; and gradients that the optimizer did not read.
        for transfer in [*self._coming.values(), *self._going.values()]:
            transfer.wait()
        self._coming, self._going = {}, {}

    def gradient_of(self, index: int) -> xp.Array | None:
        """Return a gradient that the optimizer asks for; it is done with the slice before, whose values may leave."""
        self._send_stepped()
        if index not in self._coming:
            return None

        # An optimizer that reads its gradients twice would step on values that the device has already received.
        if index in self._going:
            raise MinidistError(
                f"the gradient of {self.host[index].name!r} is read again after its values have left the host"
            )
        self._stepping = index
        return self._coming[index].wait()

    def _send_stepped(self) -> None:
        """[3] Start to send the values of the slice that was stepped last."""
        index, self._stepping = self._stepping, None
        if index is not None:
            # The values leave while the optimizer works on the next slice.
            near, far = self.device[index], self.host[index]
            self.pool.step_of(far.data.nbytes)
            self._going[index] = self.pool.start_fetch(far.data, "parameter", near.data.reshape(-1))

    def refresh(self) -> None:
        """Copy the parameters to the host again, after they were changed (loaded) on the device."""
        for near, far in zip(self.device, self.host, strict=True):
            self.pool.start_store(near.data.reshape(-1), "parameter", far.data).wait()
