"""A parameter's shard, taken from the whole.

    blocks=1                        blocks=3: a fused Q|K|V is split inside each of Q, K and V
    | rank 0 | rank 1 |             | q0 q1 | k0 k1 | v0 v1 |   rank 0 holds | q0 | k0 | v0 |

A contiguous split of a fused matrix would give rank 0 all of Q and half of K. A parameter's `Layout` says how it is
split; minidist/parallel/tensor/full_state.py joins the whole from the shards.

A style asks its context for this rank's shard of a parameter, or says that every rank keeps the whole of it. The
context remembers the answer, so a tied parameter is sharded once and stays tied:

    tied weight W:   transformer.wte ──▶ shard_of(W) ──▶ a new Parameter, the shard
                     lm_head         ──▶ shard_of(W) ──▶ the same one, since both modules share it on one device, too

Proved by: tests/parallel/test_tensor.py, tests/checkpoint/test_layouts.py
"""

from dataclasses import dataclass, field

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import Layout
from minidist.core.comm import Comm


def take_shard(array: xp.Array, layout: Layout, rank: int, ranks: int) -> xp.Array:
    """Return `rank`'s shard of `array`, a new contiguous array, over the last axis of the layout, with `ranks` ranks.

    array: the whole one, or a shard of it over the other axes.
    """
    # The split dim comes first, with the padding behind it.
    dim = layout.dims[-1]
    front = xp.moveaxis(array, dim, 0)
    if layout.padding:
        front = xp.concatenate([front, xp.zeros((layout.padding, *front.shape[1:]), array.dtype, array)])
    blocks, shards = layout.blocks, ranks // layout.copies

    # Every block is split into as many parts as there are shards; the shard has its part of each block.
    size = front.shape[0] // blocks // shards
    number = rank // layout.copies
    parts = front.reshape(blocks, shards, size, *front.shape[1:])[:, number].reshape(blocks * size, *front.shape[1:])

    # The split dim goes back to its place, in a new array: the whole one may be freed.
    shard = xp.empty(xp.moveaxis(parts, 0, dim).shape, array.dtype, array)
    xp.copyto(shard, xp.moveaxis(parts, 0, dim))
    return shard


@dataclass
class ShardContext:
    """The communicator and name of a mesh axis, and what has become of each parameter so far.

    shards: parameter of the single-device model -> this rank's shard, or the parameter itself where every rank holds
    it whole.
    """

    comm: Comm
    axis: str = "tp"
    shards: dict[Parameter, Parameter] = field(default_factory=dict)

    def shard_of(
        self, whole: Parameter, dim: int, *, blocks: int = 1, padding: int = 0, replicas: int = 1
    ) -> Parameter:
        """Return this rank's shard of `whole` along `dim`; the same one again for a tied parameter.

        blocks, padding, replicas: as in `Layout` (`copies`). Raises UsageError when a tied parameter is sharded in two
        ways.
        """
        # The first split of this parameter, or one more (experts over ep, then their matrices over tp).
        before, comm = whole.layout or Layout(tuple(whole.shape)), self.comm
        layout = Layout(
            before.global_shape,
            (*before.axes, self.axis),
            (*before.dims, dim),
            blocks=blocks,
            padding=padding,
            copies=replicas,
            ranks=(*before.ranks, tuple(comm.members)),
        )

        # A tied parameter is met once for each module that uses it: the second time it has its shard already.
        shard = self.shards.get(whole)
        if shard is None:
            if whole.flat is not None:
                hooks.refusals().refuse_flat_shard(whole)
            data = take_shard(whole.data, layout, comm.rank, comm.size)
            shard = self.shards[whole] = Parameter(data, whole.requires_grad, whole.name, whole.init)
            shard.layout = layout
        elif shard.layout != layout:
            raise UsageError(
                f"tied parameter {whole.name!r} is sharded as {shard.layout} and as {layout}; shard it one way"
            )
        return shard

    def replica_of(self, whole: Parameter) -> Parameter:
        """Return `whole` itself, which every rank holds, carrying a layout that says so."""
        if self.shards.get(whole, whole) is not whole:
            raise UsageError(
                f"tied parameter {whole.name!r} is sharded in one place and whole in another; shard it one way"
            )
        # A shard over another axis keeps its layout: over this axis it is whole.
        if whole.layout is None or not whole.layout.axes:
            whole.layout = Layout(tuple(whole.shape))
        return self.shards.setdefault(whole, whole)
