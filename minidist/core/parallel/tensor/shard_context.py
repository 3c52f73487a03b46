"""What a parallel style is given: the ranks of one mesh axis, and the shards that earlier styles have made.

    tied weight W:   transformer.wte ──▶ shard_of(W) ──▶ a new Parameter, the shard
                     lm_head         ──▶ shard_of(W) ──▶ the same one, since both modules share it on one device, too

A style asks the context for this rank's shard of a parameter, or says that every rank keeps the whole of it. The
context remembers the answer, so a tied parameter is sharded once and stays tied.

Proved by: tests/parallel/test_tensor.py
"""

from dataclasses import dataclass, field

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import Layout
from minidist.core.comm import Comm
from minidist.core.parallel.tensor.sharding import shard_parameter


@dataclass
class ShardContext:
    """The communicator and name of a mesh axis, and what has become of each parameter so far.

    shards: parameter of the single-device model -> this rank's shard, or the parameter itself where every rank holds
    it whole. kv_replicas: qualified name of a module -> how many neighbouring ranks hold the same shard of it, set by
    `HeadParallel` for the projections after it in the plan.
    """

    comm: Comm
    axis: str = "tp"
    shards: dict[Parameter, Parameter] = field(default_factory=dict)
    kv_replicas: dict[str, int] = field(default_factory=dict)

    def shard_of(
        self, whole: Parameter, dim: int, *, blocks: int = 1, padding: int = 0, replicas: int = 1
    ) -> Parameter:
        """Return this rank's shard of `whole` along `dim`; the same one again for a tied parameter.

        blocks, padding, replicas: as in `Layout` (`copies`). A parameter that is sharded over another axis already is
        sharded once more. Raises UsageError when a tied parameter is sharded in two ways.
        """
        before, ranks = whole.layout, tuple(self.comm.members)

        # The first split of this parameter, or one more (experts over ep, then their matrices over tp).
        if before is None or not before.axes:
            layout = Layout(
                tuple(whole.shape),
                (self.axis,),
                (dim,),
                blocks=blocks,
                padding=padding,
                copies=replicas,
                ranks=(ranks,),
            )
        else:
            axes, dims = (*before.axes, self.axis), (*before.dims, dim)
            layout = Layout(before.global_shape, axes, dims, ranks=(*before.ranks, ranks))

        # A tied parameter is met once for each module that uses it: the second time it has its shard already.
        if whole not in self.shards:
            self.shards[whole] = shard_parameter(whole, layout, self.comm.rank, self.comm.size)
        elif self.shards[whole].layout != layout:
            raise UsageError(
                f"tied parameter {whole.name!r} is sharded as {self.shards[whole].layout} and as {layout}; shard it"
                " one way"
            )
        return self.shards[whole]

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
