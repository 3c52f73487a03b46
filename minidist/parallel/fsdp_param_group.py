"""The parameters that FSDP gathers, uses and releases together: how they are communicated, not when.

    start_gather ─▶ finish_gather ─▶ (module computes) ─▶ release        in forward, and again in backward
    start_reduce ─▶ finish_reduce                                        in backward: the summed gradient, by shards

`fsdp_state.FSDPState` decides when each of these happens. Every step has a start and a finish so that messages travel
while something computes. With a `CPUOffloadPolicy`, shards live in host memory: they move to the device before a
gather, and the reduced gradient moves back after a reduction.

Source: Zhao et al., PyTorch FSDP, VLDB 2023; the names are those of PyTorch's FSDP2.
Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_mixed_precision_policy.py
"""

from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.arrays import downcast
from minidist.base.errors import UsageError
from minidist.base.layout import cut
from minidist.base.memory import track
from minidist.base.trace import purpose
from minidist.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minidist.comm import Comm, Work
from minidist.comm.header import OVER
from minidist.parallel.data_parallel import check_same_model
from minidist.parallel.flat_shards import Shard
from minidist.parallel.gradients import UnusedParameterError, next_model, used_anywhere
from minidist.parallel.host_pool import HostPool, Transfer
from minidist.parallel.mixed_precision import MixedPrecisionPolicy

_gathers: "WeakKeyDictionary[Comm, Comm]" = WeakKeyDictionary()  # communicator -> see `FSDPCommContext`


class FSDPCommContext:
    """The communication in flight that the parameter groups of one model share.

    gathers: a stream for all-gathers, so that they do not queue behind reductions; all models that are sharded over the
    same ranks have one, so that ranks that run two models in different orders meet, and are told. number: of the
    `fully_shard` among those on one communicator. mode: whether the model trains, see `mode_of`. means: of the loss
    that is differentiated, such as "22 rows". At most one reduction, and at most one transfer of a reduced gradient to
    the host, is in flight: more would hold more memory.
    """

    def __init__(self, comm: Comm) -> None:
        self.gathers = stream_of_gathers(comm)
        self.number = next_model(comm)
        self.mode = self.means = ""
        self.reducing: FSDPParamGroup | None = None
        self.offloading: tuple[FSDPParamGroup, Transfer] | None = None

    def discard(self) -> None:
        """Let what is in flight arrive, and forget it: the pass that it belongs to was ended by an error."""
        if self.reducing is not None:
            assert self.reducing.reduction is not None
            self.reducing.reduction.wait()
            self.reducing.reduction = None
            self.reducing = None
        if self.offloading is not None:
            self.offloading[1].wait()
            self.offloading = None

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, if there is one."""
        if self.reducing is not None:
            group, self.reducing = self.reducing, None
            group.finish_reduce(self)

    def finish_offload(self) -> None:
        """Wait for the reduced gradient on its way to the host, and add it to those of earlier micro-batches."""
        if self.offloading is not None:
            (group, transfer), self.offloading = self.offloading, None
            group.add_reduced(transfer.wait())


def stream_of_gathers(comm: Comm) -> Comm:
    """Return the stream of all-gathers over `comm`: see `FSDPCommContext`."""
    if comm not in _gathers:
        _gathers[comm] = comm.dup()
    return _gathers[comm]


class FSDPParamGroup:
    """Parameters in one flat array that are gathered and released together, and reduced as one message.

    shard: this rank's part. gathers: the stream of its all-gathers. number: that of the context, by which models are
    told apart. replicas: the ranks that hold equal copies of the shard (hybrid sharding). subgroup: the neighbours
    among which the group stays split between forward and backward. keep: it stays whole from forward to backward.
    persistent: it stays whole always, and is gathered anew only after an update. op, algorithm: of the reduction. pool:
    the host memory in which the shard lives, if any. find_unused: missing gradients are zeros. settings: of
    `fully_shard`, by name, which every rank must have alike.
    """

    def __init__(
        self,
        shard: Shard,
        policy: MixedPrecisionPolicy,
        *,
        gathers: Comm,
        number: int,
        replicas: Comm | None,
        subgroup: Comm | None,
        keep: bool,
        persistent: bool,
        op: str,
        algorithm: str,
        settings: Mapping[str, Any],
        pool: HostPool | None = None,
        find_unused: bool = False,
    ) -> None:
        self.shard, self.flat, self.gathers, self.number = shard, shard.flat, gathers, number
        self.replicas, self.subgroup, self.keep, self.persistent = replicas, subgroup, keep, persistent
        self.op, self.algorithm, self.pool, self.find_unused = op, algorithm, pool, find_unused

        # A frozen parameter that is unfrozen later would have no optimizer on any rank: its hook raises.
        self.trainable = [parameter for parameter in self.flat.parameters if parameter.requires_grad]
        for parameter in self.flat.parameters:
            if not parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._refuse_unfrozen)

        # In flight, and where the group is in its cycle of gather, compute, reduce and release.
        self.gather: Work | None = None  # the gather in flight ...
        self.arriving: xp.Array | None = None  # ... and the array that it writes to
        self.reduction: Work | None = None  # the reduction in flight
        self.part: xp.Array | None = None  # what this rank keeps of the group for its subgroup
        self.version = -1  # of the values that were gathered last
        self.differentiating = False  # backward has reached the module's output and not yet its input
        self.reduced = False  # in this backward pass
        self.kept: xp.Array | None = None  # a bit for each element of the group, of a sparse model: is it reduced?
        self.own: xp.Array | None = None  # of the reduction in flight, which elements of the shard it brings
        self.brought: set[Parameter] = set()  # whose gradients this rank has brought in this backward pass
        self.computed: set[Parameter] = set()  # whose weight gradients a backward pass deferred, and are there now

        # Rank 0's values count: along the replicas first, so that rank 0 of each shard group has them.
        check_same_model(self.flat, shard.comm, "fully_shard", settings)
        with purpose("startup"):
            if replicas is not None:
                broadcast(replicas, self.flat.data)
            broadcast(shard.comm, self.flat.data)

        # From here on the shard has an array of its own, and the whole exists only while it is gathered.
        self.device = xp.empty(0, self.flat.dtype, self.flat.data)  # an array that says where whole groups are made
        shard.detach(pool)
        self.flat.release()
        if policy.param_dtype is not None:
            self.flat.set_dtype(policy.param_dtype)
        self.reduce_dtype = self.flat.dtype if policy.reduce_dtype is None else xp.dtype(policy.reduce_dtype)

    # --- gathering ---

    def start_gather(self, context: FSDPCommContext) -> None:
        """Start to gather the latest values, unless they are here or on their way."""
        # It may be on its way already (prefetch), or still whole with the latest values (not resharded, or persistent).
        if self.gather is not None or (not self.flat.released and self.version == self.flat.version):
            return
        if not self.flat.released:
            self.flat.release()

        # The destination of the gather: the whole group, in the dtype that it computes in.
        self.arriving = track(xp.empty(self.flat.padded_numel, self.flat.dtype, self.device), "unsharded")
        with purpose("parameter_gather"):
            # Kept in parts since forward: gather among the neighbours only, from parts of the size 1/g.
            if self.subgroup is not None and self.part is not None:
                self.gather = all_gather(
                    self.subgroup, self._cast(self.part), out=self.arriving, async_op=True, equal=self._equal(context)
                )
                return

            # The cast comes before the values cross any link: half precision halves the bytes there, too.
            with self.shard.on_host():
                mine = self._cast(self.shard.data)
            # A shard in host memory is fetched first; the gather waits for it in its own stream, not the caller.
            if self.pool is None:
                equal = self._equal(context)
                self.gather = all_gather(self.gathers, mine, out=self.arriving, async_op=True, equal=equal)
            else:
                fetch = self.pool.start_fetch(mine, "communication", like=self.device)
                self.gather = self._gather_after(fetch, context)

    def _equal(self, context: FSDPCommContext) -> str:
        """What every rank must have alike when the group is gathered or reduced: compared with each message."""
        of = f"{self.flat.names[0]} of fully_shard {self.number}"
        return f"{of} after {self.flat.updates}{context.mode}{context.means and OVER + context.means}"

    def _cast(self, values: xp.Array) -> xp.Array:
        return track(downcast(values, self.flat.dtype), "communication")

    def _gather_after(self, fetch: Transfer, context: FSDPCommContext) -> Work:
        """Return a gather that begins in its stream when the shard has come from the host, and frees the copy."""
        call, out = self.gathers.collective("all_gather", self._equal(context)), self.arriving
        return call.run_async(lambda: all_gather(call, fetch.take(), out=out))

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
        """Drop the whole array, unless the group is persistent."""
        if not self.persistent and not self.flat.released:
            self.flat.release()

    # --- where the module is ---

    def after_forward(self, recording: bool) -> None:
        """Release the group, or keep of it what `reshard_after_forward` says."""
        if recording and self.keep:
            return
        # This rank's 1/g of the whole; what the neighbours keep makes it whole again for backward.
        if recording and self.subgroup is not None:
            size, rank = self.flat.padded_numel // self.subgroup.size, self.subgroup.rank
            self.part = track(xp.array(self.flat.data[rank * size : (rank + 1) * size]), "unsharded")
        self.release()

    def before_backward(self) -> None:
        """Backward has reached the module's output."""
        self.differentiating = True

    def after_backward(self, context: FSDPCommContext, deferred: bool = False) -> None:
        """Backward is done with the module: start to reduce the gradient, and release the group.

        deferred: the pass leaves the weight gradients to a `WeightGradStore`, which needs no weights.
        """
        if not self.differentiating:
            return
        self.differentiating = False
        if deferred:
            self.release()
            return
        self._fill([parameter for parameter in self.trainable if parameter.gradient.local is None])
        if self.trainable:
            self.start_reduce(context)
        self.release()

    def weight_computed(self, parameter: Parameter, context: FSDPCommContext) -> None:
        """A deferred weight gradient is there; the last one of the group starts the reduction."""
        self.computed.add(parameter)
        if len(self.computed) == len(self.trainable):
            self.start_reduce(context)
            self.computed = set()

    def weights_done(self, context: FSDPCommContext) -> None:
        """All deferred weight gradients are there and reduced; missing ones are an error, or zeros."""
        if self.trainable and not self.reduced:
            self._fill([parameter for parameter in self.trainable if parameter not in self.computed])
            self.start_reduce(context)
        self.computed, self.reduced = set(), False

    def reduce_unused(self, context: FSDPCommContext) -> None:
        """The backward pass is over and left this group out: an error, or a reduction of zeros."""
        if not self.trainable or self.reduced:
            return
        self._fill(self.trainable)
        self.start_reduce(context)

    def _fill(self, missing: list[Parameter]) -> None:
        """Let parameters without a gradient take part as zeros, or refuse them."""
        if missing and not self.find_unused:
            self._refuse_unused(missing[0])
        for parameter in missing:
            parameter.zero_fill()
        self.brought |= set(self.trainable).difference(missing)

    def end_pass(self) -> None:
        """The backward pass is over and everything is reduced: release what was gathered ahead in vain."""
        self.finish_gather()
        self.release()
        self.reduced, self.brought = False, set()

    def _refuse_unfrozen(self, parameter: Parameter) -> None:
        raise UsageError(
            f"rank {self.shard.comm.rank}: parameter {parameter.name!r} was frozen when its module was sharded, so no"
            " optimizer has its shard; set requires_grad before fully_shard, or build and shard the model anew"
        )

    def _refuse_unused(self, parameter: Parameter) -> NoReturn:
        raise UnusedParameterError(
            f"rank {self.shard.comm.rank}: parameter {parameter.name!r} got no gradient in this backward pass, so its"
            " unit cannot be reduced; use it in the loss (an array that a layer returns in place of a Tensor ends the"
            " graph), freeze it before fully_shard, or pass"
            " find_unused_parameters=True"
        )

    # --- reducing ---

    def keep_only(self, mine: xp.Array) -> None:
        """Reduce only some elements from now on; the others' gradients become zero. mine: which of the shard (bool).

        Every rank needs the bits of all shards, to leave out what their owners do: an all-gather of 1/8 B per element.
        """
        self.kept = track(all_gather(self.shard.comm, xp.packbits(mine)), "optimizer")

    def start_reduce(self, context: FSDPCommContext) -> None:
        """Start the reduce-scatter of the gradient and drop the whole one, after the reduction before it has ended."""
        # At most one reduction is in flight, so whole gradients of at most one group are in memory besides this one's.
        context.finish_reduction()
        shard = self.shard

        # Straight into the shard's gradient, unless something is there already, or it has another dtype or memory.
        if shard.filled or self.pool is not None or self.reduce_dtype != shard.dtype:
            out = track(xp.empty(shard.size, self.reduce_dtype, self.device), "communication")
        else:
            out = shard.grad_buffer()

        # (padded elements,) -> (padded elements / ranks,): each rank receives the sum of its shard.
        whole = track(downcast(self.flat.grad, self.reduce_dtype), "communication")
        counts, self.own = [shard.size] * shard.comm.size, None
        if self.kept is not None:
            kept = track(xp.unpackbits(self.kept).view(bool), "workspace")
            parts = cut(kept, counts)
            self.own, counts = parts[shard.comm.rank], [int(part.sum()) for part in parts]
            whole = track(whole[kept], "communication")
            out = track(xp.empty(counts[shard.comm.rank], self.reduce_dtype, self.device), "communication")
        with purpose("gradient_reduce"):
            self.reduction = reduce_scatter(
                shard.comm,
                whole,
                self.op,
                counts=counts,
                algorithm=self.algorithm,
                out=out,
                async_op=True,
                equal=self._equal(context),
            )
        self.flat.release_grad()
        context.reducing, self.reduced = self, True

    def finish_reduce(self, context: FSDPCommContext) -> None:
        """Wait for the reduction; sum over the replicas of the shard; add to what earlier micro-batches brought."""
        assert self.reduction is not None
        piece = self.reduction.wait()
        self.reduction = None
        if self.find_unused:
            used = self.brought
            for comm in filter(None, (self.shard.comm, self.replicas)):
                used = used_anywhere(comm, self.trainable, used)
            self.shard.note_used(used)

        # Hybrid sharding: the other shard groups have seen other rows, so their sums are added to this one's.
        if self.replicas is not None:
            with purpose("gradient_reduce"):
                equal = f"{self._equal(context)}, {self.shard.checksum()}"
                all_reduce(self.replicas, piece, self.op, algorithm=self.algorithm, equal=equal)

        # What was left out was not sent.
        if self.own is not None:
            sums, piece = piece, track(xp.zeros(self.shard.size, piece.dtype, piece), "communication")
            piece[self.own] = sums

        # Shards in device memory: done. Otherwise the sum leaves for the host, in a stream of its own, after the one
        # before.
        if self.pool is None:
            self.add_reduced(piece)
            return

        # The first sum since zero_grad may go straight into the shard's gradient on the host.
        context.finish_offload()
        target = None if self.shard.filled or piece.dtype != self.shard.dtype else self.shard.grad_buffer()
        context.offloading = self, self.pool.start_store(piece, "gradient", target)

    def add_reduced(self, piece: xp.Array) -> None:
        """Add a reduced gradient to the shard's, in its dtype; the first one may lie there already."""
        buffer, piece = self.shard.grad_buffer(), downcast(piece, self.shard.dtype)
        if self.shard.filled:
            buffer[...] += piece
        elif xp.owner(piece) is not xp.owner(buffer):
            buffer[...] = piece
        self.shard.filled = True
