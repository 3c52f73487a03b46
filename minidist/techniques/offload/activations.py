"""Activations on the host: what backward needs leaves when it is made, and comes back just in time.

    forward    block 0 ── block 1 ── block 2        an input leaves while the next block computes
    backward   block 2 ── block 1 ── block 0        it comes back one block early

Either whatever operations save moves (`SavedOnHost`), or the inputs of recomputed blocks alone (`HostCopy`).

Source: Rajbhandari et al., ZeRO, SC 2020, section 6.1 (P_a+cpu).
Proved by: tests/techniques/test_offload.py
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minidist.base.watchers import Watcher, watching
from minidist.comm.mpi.staging import is_device_array
from minidist.core.autograd.tensor import saved_tensors
from minidist.core.base import arrays as xp
from minidist.parallel.host_pool import HostPool, Transfer


class HostCopy:
    """An array that stays on the host until it is read: what `checkpoint(..., pack=)` keeps instead of an input.

    Backward reads the copies in the reverse of the order in which they were made, so reading one also starts to fetch
    the `pool.prefetch` copies that were made before it.
    """

    def __init__(self, array: xp.Array, pool: HostPool) -> None:
        self.pool, self.before = pool, pool.latest
        self.array, self.like = pool.swap_out(array).target, array if is_device_array(array) else None
        self.arriving: Transfer | None = None
        pool.latest = weakref.ref(self)

    @property
    def data(self) -> xp.Array:
        """A copy on the device; reading it also starts to fetch the copies that backward needs next."""
        # Fetch this array. The prefetch of a later one has usually started already.
        self.pool.advance()
        self.pool.wait_for_swap_out()
        self.start()
        assert self.arriving is not None
        array, self.arriving = self.arriving.wait(), None

        # Start to fetch the arrays that backward reads next; they arrive while it computes with this one.
        earlier = self.before()
        for _ in range(self.pool.prefetch):
            if earlier is not None:
                earlier.start()
                earlier = earlier.before()
        return array

    def start(self) -> None:
        """Start to fetch the array, unless it is on its way."""
        if self.arriving is None:
            self.arriving = self.pool.start_fetch(self.array, "activation", like=self.like)


class SavedOnHost(Watcher):
    """Moves what operations save for backward to the host and back: PyTorch's `save_on_cpu`.

        with SavedOnHost(pool).saving():
            loss = model(x)
        loss.backward()

    An array is moved to the host when the operation that saves it is recorded. It is fetched when backward visits its
    node, or earlier, as a prefetch for a node before it. So it crosses the link once in each direction.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._saved: list[SavedArray] = []  # saved by the operation that is being recorded

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Move the arrays that operations in the block save."""
        token = saved_tensors.set(self._keep)
        try:
            with watching(self):
                yield
        finally:
            saved_tensors.reset(token)

    def _keep(self, array: xp.Array) -> "SavedArray":
        self._saved.append(SavedArray(array))
        return self._saved[-1]

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[Any]) -> None:
        """Move the arrays that the operation saved to the host, if it has a node whose backward pass reads them."""
        arrays, self._saved = self._saved, []
        if out.node is not None:
            for array in arrays:
                array.leave(self.pool)


class SavedArray:
    """An array that a node keeps, on the device or on the host. After it is read, it is on the device again."""

    def __init__(self, array: xp.Array) -> None:
        self._kept: xp.Array | HostCopy = array

    def leave(self, pool: HostPool) -> None:
        """Move it to the host."""
        if not isinstance(self._kept, HostCopy):
            self._kept = HostCopy(self._kept, pool)

    @property
    def data(self) -> xp.Array:
        """The array on the device. The host's copy is freed when it is read."""
        if isinstance(self._kept, HostCopy):
            self._kept = self._kept.data
        return self._kept

    stored = data
