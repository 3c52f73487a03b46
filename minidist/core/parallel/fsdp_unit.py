"""A unit of FSDP: parameters in one flat array that are gathered and released together, and reduced as one message.

    shard ── start_gather ▶ arriving ── finish_gather ▶ whole (the module computes) ── release ▶ shard
    whole gradient ── start_reduce ▶ in flight ── finish_reduce ▶ added to the shard's gradient

`fsdp_state.FSDPState` decides when each of these happens. Every step has a start and a finish so that messages travel
while something computes. Four policies say how: `Reduce`, `Reshard`, `Precision`, and the `Placement` of the shards.

Source: Zhao et al., PyTorch FSDP, VLDB 2023.
Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_mixed_precision_policy.py
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import downcast
from minidist.core.base.trace import purpose
from minidist.core.base.watchers import track
from minidist.core.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minidist.core.comm import Comm, Work
from minidist.core.parallel.flat_shards import Placement, Shard
from minidist.core.parallel.gradients import UnusedParameterError, used_anywhere
from minidist.core.parallel.guard import Guard


@dataclass
class Reduce:
    """How the gradient of a unit becomes a sum: a reduce-scatter, and with replicas an all-reduce of the shard.

    op: "avg" or "sum". replicas: the ranks that hold equal copies of the shard (hybrid sharding); they have seen other
    rows. find_unused: missing gradients are zeros.
    """

    op: str
    algorithm: str = "ring"
    replicas: Comm | None = None
    find_unused: bool = False

    def start(self, shard: Shard, whole: xp.Array, out: xp.Array, equal: str) -> Work:
        """Start to sum each rank's part of `whole` there, in `out`."""
        counts = [shard.size] * shard.comm.size
        work: Work = reduce_scatter(
            shard.comm, whole, self.op, counts=counts, algorithm=self.algorithm, out=out, async_op=True, equal=equal
        )
        return work

    def finish(self, piece: xp.Array, equal: str) -> xp.Array:
        """Return the shard's gradient, from what a reduction has brought."""
        if self.replicas is not None:
            with purpose("gradient_reduce"):
                all_reduce(self.replicas, piece, self.op, algorithm=self.algorithm, equal=equal)
        return piece


@dataclass(frozen=True)
class Reshard:
    """What is left of a whole unit after its forward: nothing, unless one of these says otherwise.

    keep: all, until backward. subgroup: a part, from which these neighbours gather it for backward. persistent: all,
    always; it is gathered anew only after an update.
    """

    keep: bool = False
    subgroup: Comm | None = None
    persistent: bool = False


class Precision:
    """The dtypes of a unit: those of its parameters. `MixedPrecisionPolicy` has others."""

    param_dtype: Any = None  # in which the unit is gathered and computes
    reduce_dtype: Any = None  # in which its gradient is reduced

    def inputs(self, values: Any) -> Any:
        """Return the arguments of the module as it computes with them."""
        return values

    def outputs(self, values: Any) -> Any:
        """Return the results of the module as its caller gets them."""
        return values


class FSDPUnit:
    """This rank's shard of a unit, and what of it is in flight. guard: of the `fully_shard` that makes the unit.

    gathers: the stream of its gathers. reduce, reshard, precision, placement: how it is summed, what of it stays
    whole, in which dtypes, and where the shard lives. Methods take the `FSDPState` of the outermost module, `root`.
    """

    def __init__(
        self,
        shard: Shard,
        guard: Guard,
        gathers: Comm,
        reduce: Reduce,
        reshard: Reshard,
        precision: Precision,
        placement: Placement,
    ) -> None:
        self.shard, self.flat, self.guard, self.gathers = shard, shard.flat, guard, gathers
        self.reduce, self.reshard, self.placement = reduce, reshard, placement
        self.trainable = [parameter for parameter in self.flat.parameters if parameter.requires_grad]

        self.gather: Work | None = None  # the gather in flight ...
        self.arriving: xp.Array | None = None  # ... and the array that it writes to
        self.reduction: Work | None = None  # the reduction in flight
        self.part: xp.Array | None = None  # what this rank keeps of the unit for its subgroup
        self.version = -1  # of the values that were gathered last
        self.differentiating = False  # backward has reached the module's output and not yet its input
        self.reduced = False  # in this backward pass
        self.brought: set[Parameter] = set()  # whose gradients this rank has brought in this backward pass
        self.computed: set[Parameter] = set()  # whose weight gradients a backward pass deferred, and are there now

        # Rank 0's values count: along the replicas first, so that rank 0 of each shard group has them.
        with purpose("startup"):
            for comm in filter(None, (reduce.replicas, shard.comm)):
                broadcast(comm, self.flat.data)

        # From here on the shard has a separate array, and the whole exists only while it is gathered.
        self.device = xp.empty(0, self.flat.dtype, self.flat.data)  # an array that says where whole units are made
        shard.detach(placement)
        self.flat.release()
        if precision.param_dtype is not None:
            self.flat.dtype = xp.dtype(precision.param_dtype)
        self.reduce_dtype = self.flat.dtype if precision.reduce_dtype is None else xp.dtype(precision.reduce_dtype)

    # --- the parameters ---

    def start_gather(self, root: Any) -> None:
        """Start to gather the latest values, unless they are here or on their way."""
        # It may be on its way already (prefetch), or still whole with the latest values (not resharded, or persistent).
        if self.gather is not None or (not self.flat.released and self.version == self.flat.version):
            return
        if not self.flat.released:
            self.flat.release()

        # The destination of the gather: the whole unit, in the dtype that it computes in.
        self.arriving = track(xp.empty(self.flat.padded_numel, self.flat.dtype, self.device), "unsharded")
        equal = root.guard.of_unit(self.flat, self.guard)
        with purpose("parameter_gather"):
            # Kept in parts since forward: gather among the neighbours only, from parts of the size 1/g.
            if self.reshard.subgroup is not None and self.part is not None:
                part = self._cast(self.part)
                self.gather = all_gather(self.reshard.subgroup, part, out=self.arriving, async_op=True, equal=equal)
                return

            # The cast comes before the values cross any link: half precision halves the bytes there, too.
            with self.placement.memory():
                mine = self._cast(self.shard.data)
            self.gather = self.placement.gather(self.gathers, mine, self.arriving, equal)

    def _cast(self, values: xp.Array) -> xp.Array:
        return track(downcast(values, self.flat.dtype), "communication")

    def finish_gather(self) -> None:
        """Wait for the gather in flight and make the parameters views of what came."""
        if self.gather is not None:
            self.gather.wait()
            assert self.arriving is not None
            # A write into the gathered copy (`p.data[...] = x`) would be lost with it, so NumPy refuses it.
            if type(self.arriving) is np.ndarray:
                self.arriving.flags.writeable = False
            self.flat.bind(self.arriving)
            self.version = self.flat.version
            self.gather = self.arriving = self.part = None

    def release(self) -> None:
        """Drop the whole array, unless the unit is persistent."""
        if not self.reshard.persistent and not self.flat.released:
            self.flat.release()

    def after_forward(self, recording: bool) -> None:
        """Release the unit, or keep of it what `reshard_after_forward` says."""
        if recording and self.reshard.keep:
            return
        # This rank's 1/g of the whole; what the neighbours keep makes it whole again for backward.
        subgroup = self.reshard.subgroup
        if recording and subgroup is not None:
            size, rank = self.flat.padded_numel // subgroup.size, subgroup.rank
            self.part = track(xp.array(self.flat.data[rank * size : (rank + 1) * size]), "unsharded")
        self.release()

    # --- the gradient ---

    def after_backward(self, root: Any, deferred: bool) -> None:
        """Backward is done with the module: start to reduce the gradient, and release the unit.

        deferred: the pass leaves the weight gradients to a `WeightGradStore`, which needs no weights.
        """
        if not self.differentiating:
            return
        self.differentiating = False
        if not deferred and self.trainable:
            self.reduce_now(root, [parameter for parameter in self.trainable if parameter.gradient.local is None])
        self.release()

    def weight_computed(self, parameter: Parameter, root: Any) -> None:
        """A deferred weight gradient is there; the last one of the unit starts the reduction."""
        self.computed.add(parameter)
        if len(self.computed) == len(self.trainable):
            self.reduce_now(root, [])

    def reduce_now(self, root: Any, missing: list[Parameter]) -> None:
        """Start the reduction without the parameters that got no gradient: they are an error, or zeros."""
        if missing and not self.reduce.find_unused:
            raise UnusedParameterError(
                f"rank {self.shard.comm.rank}: parameter {missing[0].name!r} got no gradient in this backward pass, so"
                " its unit cannot be reduced; use it in the loss (an array that a layer returns in place of a Tensor"
                " ends the graph), freeze it before fully_shard, or pass find_unused_parameters=True"
            )
        for parameter in missing:
            parameter.zero_fill()
        self.brought |= set(self.trainable).difference(missing)
        self.start_reduce(root)

    def end_pass(self) -> None:
        """The backward pass is over and everything is reduced: release what was gathered ahead in vain."""
        self.finish_gather()
        self.release()
        self.reduced, self.brought = False, set()

    def start_reduce(self, root: Any) -> None:
        """Start the reduce-scatter of the gradient and drop the whole one, after the reduction before it has ended."""
        # At most one reduction is in flight, so whole gradients of at most one unit are in memory besides this one's.
        root.finish_reduction()
        shard = self.shard

        # Straight into the shard's gradient, unless something is there already, or it has another dtype or memory.
        if shard.filled or self.placement.apart or self.reduce_dtype != shard.dtype:
            out = track(xp.empty(shard.size, self.reduce_dtype, self.device), "communication")
        else:
            out = shard.grad_buffer()

        # (padded elements,) -> (padded elements / ranks,): each rank receives the sum of its shard.
        whole = track(downcast(self.flat.grad, self.reduce_dtype), "communication")
        with purpose("gradient_reduce"):
            self.reduction = self.reduce.start(shard, whole, out, root.guard.of_unit(self.flat, self.guard))
        self.flat.release_grad()
        root.reducing, self.reduced = self, True

    def finish_reduce(self, root: Any) -> None:
        """Wait for the reduction; sum over the replicas of the shard; add to what earlier micro-batches brought."""
        assert self.reduction is not None
        piece = self.reduction.wait()
        self.reduction = None
        if self.reduce.find_unused:
            used = self.brought
            for comm in filter(None, (self.shard.comm, self.reduce.replicas)):
                used = used_anywhere(comm, self.trainable, used)
            self.shard.note_used(used)
        self.placement.deliver(self, self.reduce.finish(piece, root.guard.of_copies(self.shard, self.guard)))

    def add_reduced(self, piece: xp.Array) -> None:
        """Add a reduced gradient to the shard's, in its dtype; the first one may lie there already."""
        buffer, piece = self.shard.grad_buffer(), downcast(piece, self.shard.dtype)
        if self.shard.filled:
            buffer[...] += piece
        elif xp.owner(piece) is not xp.owner(buffer):
            buffer[...] = piece
        self.shard.filled = True
