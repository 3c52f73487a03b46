"""Host memory next to a device, and the link between them: a stream per direction, so transfers hide behind computing.

    device ──▶ to host ──▶ pool          start_store: begin to copy to the host;     Transfer.wait: it is there
    device ◀── to device ◀── pool        start_fetch: begin to copy to the device

With NumPy there is only one memory. The device's bytes are in the rank's account and the host's bytes in the pool's.
Every transfer is a real copy that is made at once, and the time it takes (bytes / bandwidth) passes in its stream on
the virtual clock. With CuPy host arrays are in pinned memory, and each direction has a CUDA stream, which waits for the
kernels that were issued before.

Proved by: tests/techniques/test_offload.py, tests/parallel/test_fully_shard.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from minidist.base.limits import check_number, check_whole
from minidist.base.memory import MemoryAccount
from minidist.base.watchers import track, watching
from minidist.comm.mpi.staging import is_device_array, pinned_like
from minidist.core.autograd import current_pass
from minidist.core.base import arrays as xp
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm, Work
from minidist.core.parallel.zero import Shard
from minidist.parallel.fsdp_options import OptionalUnit

STEP_PASSES = 7  # arrays that Adam reads or writes for each element: gradient, and value and two moments twice


class Transfer:
    """A copy in flight. `wait()` returns the array at its destination; until then the source stays alive."""

    def __init__(self, source: xp.Array, target: xp.Array, work: Work, event: Any = None) -> None:
        self._source: Any = source  # None when the copy is complete
        self.target: Any = target  # None after `take`
        self._work, self._event = work, event

    def wait(self) -> xp.Array:
        """Wait until the copy is complete and return it."""
        # The source is kept until here, because it is read until the copy is complete.
        if self._source is not None:
            self._work.wait()
            if self._event is not None:
                self._event.synchronize()
            self._source = None
        return self.target  # type: ignore[no-any-return]

    def take(self) -> xp.Array:
        """Return what `wait` returns, and keep no reference to it."""
        array, self.target = self.wait(), None
        return array


class HostPool:
    """A rank's host memory and the link to it.

    bandwidth: bytes per second in each direction, on the virtual clock. host_bandwidth: bytes per second of the host's
    own memory; an optimizer's step on the host reads or writes 7 arrays with it, and takes no time if it is 0.
    prefetch: the number of blocks whose inputs are fetched ahead in backward. account: the account of the host's
    memory. to_host, to_device: the bytes transferred so far.
    """

    def __init__(self, comm: Comm, bandwidth: float = 16e9, host_bandwidth: float = 0.0, prefetch: int = 1) -> None:
        check_number("bandwidth", bandwidth, above=0)
        check_number("host_bandwidth", host_bandwidth)
        check_whole("prefetch", prefetch)
        self.comm, self.bandwidth, self.host_bandwidth, self.prefetch = comm, bandwidth, host_bandwidth, prefetch

        # The memory of the host, and the bytes that have crossed the link in each direction.
        self.account = MemoryAccount()
        self.to_host = self.to_device = 0

        # One stream per direction, so that a fetch does not queue behind a store.
        self._down, self._up = comm.dup(), comm.dup()  # streams of virtual time; they send no messages
        self._streams: dict[str, Any] = {}  # CuPy's, by direction
        self.storing: tuple[Any, Transfer] | None = None  # an FSDP unit, and its gradient on the way here
        self._swapping_out: Transfer | None = None  # at most one block's input is copied to the host at a time
        self.latest: Callable[[], Any] = lambda: None  # a weak reference to the copy of an activation made last

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is allocated in the block as memory of the host."""
        with watching(self.account):
            yield

    def empty(self, array: xp.Array, purpose: str) -> xp.Array:
        """Return uninitialized host memory of `array`'s shape and dtype."""
        return self.account.track(pinned_like(array) if is_device_array(array) else xp.empty_like(array), purpose)

    def copy(self, array: xp.Array, purpose: str) -> xp.Array:
        """Return a host copy of an array, for the setup of a job: no transfer is counted, and no time passes."""
        out = self.empty(array, purpose)
        _copy(array, out, None)
        return out

    def start_store(self, array: xp.Array, purpose: str, out: xp.Array | None = None) -> Transfer:
        """Begin to copy a device array to the host (into `out`, a host array); do not change `array` meanwhile."""
        out = self.empty(array, purpose) if out is None else out
        self.to_host += array.nbytes
        return self._transfer(array, out, self._down, "to host")

    def start_fetch(
        self, array: xp.Array, purpose: str, out: xp.Array | None = None, like: xp.Array | None = None
    ) -> Transfer:
        """Begin to copy a host array to the device (into `out`, or a new array on the device of `like`)."""
        out = track(xp.empty(array.shape, array.dtype, like), purpose) if out is None else out
        self.to_device += array.nbytes
        return self._transfer(array, out, self._up, "to device")

    def step_of(self, nbytes: int) -> None:
        """Let the time pass that an optimizer on the host needs to step `nbytes` bytes of parameters."""
        if self.host_bandwidth:
            self.comm.compute(seconds=STEP_PASSES * nbytes / self.host_bandwidth, name="host step")

    def swap_out(self, array: xp.Array) -> Transfer:
        """Begin to move an activation to the host, after the transfer of the one before is complete."""
        # First let the time pass in which this array was computed, then wait for the transfer before.
        self.advance()
        self.wait_for_swap_out()
        self._swapping_out = self.start_store(array, "activation")
        return self._swapping_out

    def wait_for_swap_out(self) -> None:
        """Wait until the transfer of the activation that was swapped out last is complete."""
        if self._swapping_out is not None:
            self._swapping_out.wait()
            self._swapping_out = None

    def advance(self) -> None:
        """Advance the virtual clock by the time of what has been computed so far. Call it before any wait."""
        self.comm.advance_clock("backward" if current_pass() else "forward")

    def _transfer(self, source: xp.Array, target: xp.Array, stream: Comm, name: str) -> Transfer:
        # The transfer starts when everything computed so far is done, and its time passes in the link's own stream.
        self.advance()
        event = _copy(source, target, self._streams.setdefault(name, {}))
        work = stream.collective(name).run_async(lambda: self._take_time(source.nbytes / self.bandwidth, name))
        return Transfer(source, target, work, event)

    def _take_time(self, seconds: float, name: str) -> None:
        """Let time pass in the link's stream. The trace records it as a transfer, not as computing."""
        self.comm.compute(seconds=seconds, name=name)
        spans = self.comm.trace.spans
        if spans and spans[-1].name == name:
            spans[-1].category = "offload"


def _copy(source: Any, target: Any, kept: dict[str, Any] | None) -> Any:
    """Copy between memories and return an event to wait for, if any.

    NumPy copies at once. CuPy copies in the direction's own stream, which is stored in `kept`; if `kept` is None, the
    copy is complete on return.
    """
    # NumPy has one memory, so the copy is complete at once.
    if not is_device_array(source) and not is_device_array(target):
        xp.copyto(target, source)
        return None
    import cupy

    # With CuPy the copy starts when the kernels issued so far are done: they may still write the source, or read the
    # target.
    computing = cupy.cuda.get_current_stream()
    stream = computing if kept is None else kept.setdefault("stream", cupy.cuda.Stream(non_blocking=True))
    stream.wait_event(computing.record())
    if is_device_array(source):
        source.get(stream=stream, out=target, blocking=False)
    else:
        target.set(source, stream=stream)
    event = stream.record()

    # A copy in the setup of a job overlaps with nothing, so wait for it here.
    if kept is None:
        event.synchronize()
    return event


@dataclass(frozen=True)
class CPUOffloadPolicy:
    """For `fully_shard(offload_policy=)`: shards of parameters and gradients live in `pool`.

    A shard moves to the device before its unit is gathered, the reduced gradient moves back after its reduction. The
    optimizer works on host arrays; step it inside `pool.on_host()`, so that its state is counted there.
    """

    pool: HostPool

    @property
    def kinds(self) -> tuple[Any, Any]:
        """What makes a shard, and a unit."""
        return partial(HostShard, self.pool), partial(HostUnit, self.pool)


class HostShard(Shard):
    """A shard whose values and gradient live in a pool."""

    def __init__(self, pool: HostPool, *arguments: Any) -> None:
        self.pool = pool
        super().__init__(*arguments)

    def detach(self) -> None:
        """Keep the values in a separate array of the pool, so that the whole can be released."""
        self.own = self.pool.copy(self.flat.data[self.start : self.stop], "parameter")

    def grad_buffer(self) -> xp.Array:
        """Return the array of the shard's gradient, memory of the host."""
        with self.pool.on_host():
            return super().grad_buffer()


class HostUnit(OptionalUnit):
    """A unit whose shard lives in a pool."""

    def __init__(self, pool: HostPool, *arguments: Any) -> None:
        self.pool = pool
        super().__init__(*arguments)

    def gather_shards(self, whole: xp.Array, equal: str) -> Work:
        """Start to fetch this rank's shard, and to gather all shards into `whole`."""
        with self.pool.on_host():
            mine = self.cast(self.shard.data)

        # The gather waits for the values in its own stream, not the caller; then their copy is freed.
        fetch, call = (
            self.pool.start_fetch(mine, "communication", like=whole),
            self.gathers.collective("all_gather", equal),
        )
        return call.run_async(lambda: all_gather(call, fetch.take(), out=whole))

    def destination(self) -> xp.Array:
        """Return a new array for a sum, which must move before it can be added to the shard's gradient."""
        return track(xp.empty(self.shard.size, self.reduce_dtype, self.device), "communication")

    def deliver(self, piece: xp.Array) -> None:
        """Start to move a reduced gradient to the host."""
        # One sum is on its way at a time: more would hold more memory.
        self.finish_store()
        # The first sum since zero_grad may go straight into the shard's gradient.
        shard = self.shard
        target = None if shard.filled or piece.dtype != shard.dtype else shard.grad_buffer()
        self.pool.storing = self, self.pool.start_store(piece, "gradient", target)

    def finish_store(self, keep: bool = True) -> None:
        """Wait for the gradient that is on its way to the host; keep: add it to its shard's."""
        if self.pool.storing is not None:
            (unit, transfer), self.pool.storing = self.pool.storing, None
            piece = transfer.wait()
            if keep:
                OptionalUnit.deliver(unit, piece)

    def settle(self) -> None:
        """All gradients of a pass are reduced: wait for their way to the host."""
        self.finish_store()
        super().settle()

    def forget(self) -> None:
        """Undo what a backward pass has left behind that an error ended."""
        self.finish_store(keep=False)
        super().forget()
