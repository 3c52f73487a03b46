"""A unit of FSDP: parameters in one flat array that are gathered and released together, and reduced as one message.

    shard ── start_gather ▶ arriving ── finish_gather ▶ whole (the module computes) ── release ▶ shard
    whole gradient ── start_reduce ▶ in flight ── finish_reduce ▶ added to the shard's gradient

`fsdp.FSDPState` decides when each of these happens. Every step has a start and a finish, so that messages are
sent while something computes.

Source: Zhao et al., PyTorch FSDP, VLDB 2023.
Proved by: tests/parallel/test_fully_shard.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.base.watchers import track
from minidist.core.collectives import all_gather, broadcast, reduce_scatter
from minidist.core.comm import Comm, Work
from minidist.core.parallel.flat_shards import Shard
from minidist.core.parallel.gradients import Guard


class FSDPUnit:
    """This rank's shard of a unit, and what of it is in flight. guard: of the `fully_shard` that makes the unit.

    gathers: the stream of its gathers. algorithm: of its reductions. keep: stay whole from forward until backward.
    Methods take the `FSDPState` of the outermost module, `root`.
    """

    def __init__(self, shard: Shard, guard: Guard, gathers: Comm, algorithm: str, keep: bool = False) -> None:
        self.shard, self.flat, self.guard, self.gathers = shard, shard.flat, guard, gathers
        self.algorithm, self.keep = algorithm, keep
        self.trainable = [parameter for parameter in self.flat.parameters if parameter.requires_grad]

        self.gather: tuple[Work, xp.Array] | None = None  # the gather in flight, and the array that it writes to
        self.version = -1  # of the values that were gathered last
        self.differentiating = False  # backward has reached the module's output and not yet its input
        self.left = dict.fromkeys(self.trainable)  # not reduced yet in this pass, or, if deferred, not computed yet

        # Rank 0's values count. From here on the shard has a separate array, and the whole exists only while it is
        # gathered; `device`, an empty array, says on which device.
        with purpose("startup"):
            broadcast(shard.comm, self.flat.data)
        self.device = xp.empty(0, self.flat.dtype, self.flat.data)
        shard.detach()
        self.flat.release()

    # --- the parameters ---

    def start_gather(self, root: Any) -> None:
        """Start to gather the latest values, unless they are here or on their way."""
        # It may be on its way already (prefetch), or still whole with the latest values (not resharded).
        if self.gather is not None or (not self.flat.released and self.version == self.flat.version):
            return
        if not self.flat.released:
            self.flat.release()

        whole = track(xp.empty(self.flat.padded_numel, self.flat.dtype, self.device), "unsharded")
        with purpose("parameter_gather"):
            self.gather = self.all_gather(whole, root.guard.of_unit(self.flat, self.guard)), whole

    def all_gather(self, whole: xp.Array, equal: str) -> Any:
        """Start to gather the values of all ranks into `whole`; return what waits for it."""
        return all_gather(self.gathers, self.shard.data, out=whole, async_op=True, equal=equal)

    def finish_gather(self) -> None:
        """Wait for the gather in flight and make the parameters views of what came."""
        if self.gather is not None:
            work, whole = self.gather
            work.wait()
            # A write into the gathered copy (`p.data[...] = x`) would be lost with it, so NumPy refuses it.
            if type(whole) is np.ndarray:
                whole.flags.writeable = False
            self.flat.bind(whole)
            self.gather, self.version = None, self.flat.version

    def release(self) -> None:
        """Drop the whole array."""
        if not self.flat.released:
            self.flat.release()

    def after_forward(self, recording: bool) -> None:
        """Release the unit, unless it stays whole until backward."""
        if not (recording and self.keep):
            self.release()

    # --- the gradient ---

    def after_backward(self, root: Any) -> None:
        """Backward is done with the module: start to reduce the gradient, and release the unit."""
        if not self.differentiating:
            return
        self.differentiating = False
        # In a pass with a store the weight gradients are computed later; they need no weights.
        if root.running.store is None and self.trainable:
            self.reduce_now(root, [parameter for parameter in self.trainable if parameter.gradient.local is None])
        self.release()

    def reduce_now(self, root: Any, missing: list[Parameter]) -> None:
        """Start the reduction; parameters that got no gradient are an error."""
        for parameter in missing:
            self.guard.unused(
                self.shard.comm.rank, parameter, "its unit cannot be reduced", "freeze it before fully_shard"
            )
        self.start_reduce(root)

    def start_reduce(self, root: Any) -> None:
        """Start the reduce-scatter of the gradient and drop the whole one, after the reduction before it has ended."""
        # At most one reduction is in flight, so whole gradients of at most one unit are in memory besides this one's.
        root.finish_reduction()

        # (padded elements,) -> (padded elements / ranks,): each rank receives the sum of its shard.
        counts, equal = [self.shard.size] * self.shard.comm.size, root.guard.of_unit(self.flat, self.guard)
        with purpose("gradient_reduce"):
            work = self.reduce_scatter(self.flat.grad, counts, self.destination(), equal)
        self.flat.release_grad()
        root.reducing, self.left = (self, work), {}

    def reduce_scatter(self, whole: xp.Array, counts: list[int], out: xp.Array, equal: str) -> Any:
        """Start to sum each rank's part of `whole`, of the number of elements in `counts`, there, in `out`."""
        how: Any = {"counts": counts, "algorithm": self.algorithm, "equal": equal}
        return reduce_scatter(self.shard.comm, whole, self.guard.op, async_op=True, out=out, **how)

    def destination(self) -> xp.Array:
        """Return the array for a sum: the shard's gradient, unless something is there already."""
        return self.shard.destination()

    def finish_reduce(self, root: Any, piece: xp.Array) -> None:
        """Take the sum that a reduction has brought."""
        self.deliver(piece)

    def deliver(self, piece: xp.Array) -> None:
        """Add a sum to those of earlier micro-batches in the shard; the first one may lie there already."""
        buffer = self.shard.grad_buffer()
        if self.shard.filled:
            buffer[...] += piece
        elif xp.owner(piece) is not xp.owner(buffer):
            buffer[...] = piece
        self.shard.filled = True

    # --- the end of a pass ---

    def settle(self) -> None:
        """All gradients of a pass are reduced; the next one begins."""
        self.left = dict.fromkeys(self.trainable)

    def end_pass(self) -> None:
        """A backward pass is over: release what was gathered ahead in vain."""
        self.finish_gather()
        self.release()

    def forget(self) -> None:
        """Undo what a backward pass has left behind that an error ended."""
        self.differentiating = False
        self.flat.release_grad()
        self.settle()
        self.end_pass()
