"""The degrees of parallelism, and the communicators that they make.

    ranks = pp x dp x cp x tp, the last axis fastest, see comm/mesh.py

The axis that sends most has the closest ranks: tp sends in every layer, pp once per micro-batch and stage, dp once per
step. An expert-parallel rank is also a data-parallel rank (it has its own rows), so `ep` divides `dp` and costs no
ranks: dp = edp x ep. Names are Megatron's (edp: expert data parallel).

Proved by: tests/parallel/test_dims.py
"""

from dataclasses import dataclass

from minidist.core.base import hooks
from minidist.core.comm import Comm, Mesh


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks each kind of parallelism has. `fitting_dims.dims_of` makes one that fits a number of ranks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """The product of the degrees."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Data-parallel ranks that hold the same experts."""
        return self.dp // self.ep

    def axes(self, comm: Comm) -> "Axes":
        """Return this rank's communicators; UsageError when they do not fit. Sends nothing; every rank calls it."""
        hooks.check_layout(self, comm)
        return Axes(self, comm)


class Axes:
    """This rank's communicator on each axis, and on the two products over which gradients are summed.

    pp, dp, cp, tp, ep, edp: as in `ParallelDims`. data: dp x cp (with context parallelism every rank sees a part of the
    tokens, so each gradient is a summand, also where there is one replica). expert_data: edp x cp, for the experts,
    whose own rank has seen the tokens of all ep ranks.
    """

    def __init__(self, dims: ParallelDims, comm: Comm) -> None:
        self.dims, self.comm = dims, comm

        # Data parallelism alone needs no mesh, which would be slow to make for 10,000 ranks.
        if dims.dp == comm.size:
            self.dp = self.data = comm
            self.pp = self.cp = self.tp = comm.group([comm.rank], "alone")
        else:
            # The last axis is the fastest: tp ranks are neighbours, pp ranks are the farthest apart.
            mesh = Mesh(comm, (dims.pp, dims.dp, dims.cp, dims.tp), ("pp", "dp", "cp", "tp"))
            self.pp, self.dp, self.cp, self.tp = (mesh[name] for name in mesh.axis_names)
            self.data = mesh["dp", "cp"] if dims.cp > 1 else self.dp

        # Experts: dp is cut into edp x ep, so that ep ranks are the nearest data-parallel ones.
        self.ep, self.expert_data = self.dp.group([self.dp.rank], "ep"), self.data
        if dims.ep > 1:
            mesh = Mesh(self.data, (dims.edp, dims.ep, dims.cp), ("edp", "ep", "cp"))
            self.ep, self.expert_data = mesh["ep"], mesh["edp", "cp"]

    def __getitem__(self, name: str) -> Comm:
        """Return a communicator by name, for `full_tensor` and its kin."""
        return getattr(self, name)
