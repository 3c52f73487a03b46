"""A unit of ZeRO 3: parameters in one flat array that are gathered, used and released together, and reduced as one.

    start_gather ─▶ finish_gather ─▶ (computing) ─▶ release              forward, and backward
    start_reduce ─▶ finish_reduce                                        backward: the sum of the gradient goes to its owners

When to do what is the business of `fully_shard.State`; this file knows how. Each step is split in a start and a finish,
so that the wire works while something computes. With a policy, shards live on the host: up before a gather, down after
a reduction.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.half import rounded
from minidist.base.memory import track
from minidist.base.trace import purpose
from minidist.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minidist.comm import Comm, Work
from minidist.parallel.data_parallel import check_same_model
from minidist.parallel.flat_shards import Shard
from minidist.parallel.gradients import UnusedParameterError
from minidist.parallel.host_pool import HostPool, Transfer

if TYPE_CHECKING:
    from minidist.parallel.fully_shard import State


class Unit:
    """Parameters that are gathered and released together.

    keep: whole from forward to backward. persistent: whole always, gathered anew only after an update.
    """

    def __init__(
        self,
        shard: Shard,
        state: "State",
        *,
        replicas: Comm | None,
        group: Comm | None,
        keep: bool,
        persistent: bool,
        op: str,
        algorithm: str,
        pool: HostPool | None = None,
    ) -> None:
        self.shard, self.flat, self.state = shard, shard.flat, state
        self.replicas, self.group, self.keep, self.persistent = replicas, group, keep, persistent
        self.op, self.algorithm, self.pool = op, algorithm, pool
        self.trainable = [parameter for parameter in self.flat.parameters if parameter.requires_grad]
        for parameter in set(self.flat.parameters) - set(self.trainable):
            parameter.register_post_accumulate_grad_hook(self._thawed)
        self.arriving: xp.Array | None = None  # what a gather under way writes to
        self.gather: Work | None = None
        self.reduction: Work | None = None
        self.part: xp.Array | None = None  # 1/g of the unit, kept between forward and backward
        self.version = -1  # of the values that were gathered
        self.differentiating = self.reduced = False
        check_same_model(self.flat, shard.comm)
        with purpose("startup"):
            if replicas is not None:
                broadcast(replicas, self.flat.data)
            broadcast(shard.comm, self.flat.data)
        policy = state.policy
        self.device = xp.empty(0, self.flat.dtype, self.flat.data)  # says where whole units are made
        mine = self.flat.data[shard.start : shard.stop]
        if pool is None:
            shard.own = track(xp.array(mine), "parameter")
        else:
            shard.own, shard.on_host = pool.copy(mine, "parameter"), pool.on_host
        self.flat.release()
        self.flat.dtype = (
            self.flat.dtype if policy.param_dtype is None else xp.dtype(policy.param_dtype)
        )  # of the whole unit
        self.reduce_dtype = self.flat.dtype if policy.reduce_dtype is None else xp.dtype(policy.reduce_dtype)

    # gathering --------------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start to gather the latest values, unless they are here or on their way."""
        if self.gather is not None or (not self.flat.released and self.version == self.flat.version):
            return
        if not self.flat.released:
            self.flat.release()
        self.arriving = track(xp.empty(self.flat.padded_numel, self.flat.dtype, self.device), "unsharded")
        comm, mine = (self.state.root.gathers, self.shard.data) if self.part is None else (self.group, self.part)
        with purpose("parameter_gather"):
            with self.shard.on_host() if self.part is None else nullcontext():
                mine = track(rounded(mine, self.flat.dtype), "communication")  # before it crosses: 2 bytes, not 4
            if self.pool is None or self.part is not None:
                self.gather = all_gather(comm, mine, out=self.arriving, async_op=True)  # type: ignore[arg-type]
            else:
                self.gather = self._fetch_and_gather(self.pool.start_fetch(mine, "communication", like=self.device))

    def _fetch_and_gather(self, fetch: Transfer) -> Work:
        """The gather begins in its lane when the shard has come up from the host; the copy that came goes with it."""
        channel, out = self.state.root.gathers.collective("all_gather"), self.arriving
        return channel.post(lambda: all_gather(channel, fetch.take(), out=out))

    def finish_gather(self) -> None:
        """Wait for the gather, and let the parameters be views of what came."""
        if self.gather is not None:
            self.gather.wait()
            self.flat.bind(self.arriving)
            self.version = self.flat.version
            self.gather = self.arriving = self.part = None

    def release(self) -> None:
        """Drop the whole unit, unless it is persistent."""
        if not self.persistent and not self.flat.released:
            self.flat.release()

    # where the module is ----------------------------------------------------------------------------------------------

    def after_forward(self, recording: bool) -> None:
        """Release, or keep what `reshard_after_forward` says."""
        if recording and self.keep:
            return
        if recording and self.group is not None:
            size = self.flat.padded_numel // self.group.size
            self.part = track(
                xp.array(self.flat.data[self.group.rank * size : (self.group.rank + 1) * size]), "unsharded"
            )
        self.release()

    def after_backward(self) -> None:
        """All gradients of the unit are there: send them to their owners, and release."""
        if not self.differentiating:
            return
        self.differentiating = False
        missing = [parameter for parameter in self.trainable if parameter.gradient.local is None]
        if missing:
            self._unused(missing[0])
        if self.trainable:
            self.start_reduce()
        self.release()

    def end_pass(self) -> None:
        """After a backward pass: what was gathered ahead in vain is released, what was left out is an error."""
        self.finish_gather()
        self.release()
        if self.trainable and not self.reduced:
            self._unused(self.trainable[0])
        self.reduced = False

    def _thawed(self, parameter: Parameter) -> None:
        raise UsageError(
            f"rank {self.shard.comm.rank}: parameter {parameter.name!r} was frozen when its module was sharded, so no"
            " optimizer has its shard; set requires_grad before fully_shard, or build and shard the model anew"
        )

    def _unused(self, parameter: Parameter) -> None:
        raise UnusedParameterError(
            f"rank {self.shard.comm.rank}: parameter {parameter.name!r} got no gradient in this backward pass, so its"
            " unit cannot be reduced; use it in the loss, or freeze it before fully_shard"
        )

    # reducing ---------------------------------------------------------------------------------------------------------

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the unit's gradient and drop the whole one; wait for the one before, first."""
        root, shard = self.state.root, self.shard
        if root.reducing is not None:
            root.reducing.finish_reduce()
        if shard.filled or self.pool is not None or self.reduce_dtype != shard.dtype:
            out = track(xp.empty(shard.size, self.reduce_dtype, self.device), "communication")
        else:
            out = shard.grad_buffer()
        whole = track(rounded(self.flat.grad, self.reduce_dtype), "communication")
        with purpose("gradient_reduce"):
            self.reduction = reduce_scatter(
                shard.comm, whole, self.op, algorithm=self.algorithm, out=out, async_op=True
            )
        self.flat.release_grad()
        root.reducing, self.reduced = self, True

    def finish_reduce(self) -> None:
        """Wait for it; sum over the replicas of the shard; add to what earlier micro-batches brought."""
        assert self.reduction is not None
        piece = self.reduction.wait()
        self.reduction = self.state.root.reducing = None
        if self.replicas is not None:
            with purpose("gradient_reduce"):
                all_reduce(self.replicas, piece, self.op, algorithm=self.algorithm)
        if self.pool is None:
            self._add(piece)
            return
        root = self.state.root
        root.settle()
        target = None if self.shard.filled or piece.dtype != self.shard.dtype else self.shard.grad_buffer()
        root.descending = self, self.pool.start_store(piece, "gradient", target)

    def _add(self, piece: xp.Array) -> None:
        buffer, piece = self.shard.grad_buffer(), rounded(piece, self.shard.dtype)
        if self.shard.filled:
            buffer[...] += piece
        elif xp.owner(piece) is not xp.owner(buffer):  # it came in another dtype
            buffer[...] = piece
        self.shard.filled = True
