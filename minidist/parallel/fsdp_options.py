"""What `fully_shard` can do in addition to the core's: other meshes, dtypes, memories, and parts that stay whole.

    mesh of two axes                    (replicate, shard): equal copies of the shards, whose sums are all-reduced
    reshard_after_forward=4             4 neighbours keep 1/4 of a unit each for its backward
    persistence_threshold, expert_mesh  a module has more than one unit: of small parameters, and of its experts
    mp_policy, offload_policy           the dtypes of a unit; where shards of parameters and gradients live
    find_unused_parameters              parameters without a gradient take part as zeros

Source: Zhao et al., PyTorch FSDP, VLDB 2023.
Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_mixed_precision_policy.py
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from minidist.base.errors import UsageError, nearest
from minidist.base.limits import check_number, check_whole
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import downcast
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import all_gather, all_reduce, broadcast
from minidist.core.comm import Comm, Mesh, check_communicator
from minidist.core.nn.module import Module
from minidist.core.optim import NORM_BLOCK
from minidist.core.parallel.data_parallel import operation_of
from minidist.core.parallel.fsdp import FSDPState, FSDPUnit, gathers_of, states_of
from minidist.core.parallel.zero import Shard
from minidist.parallel.mixed_precision import MixedPrecisionPolicy
from minidist.parallel.unused import used_anywhere


@dataclass(frozen=True)
class Sharding:
    """The further arguments of `fully_shard`.

    mp_policy: the dtypes of the unit, see `MixedPrecisionPolicy`; a nested module's own policy takes precedence.
    offload_policy: where shards of parameters and gradients, and so the optimizer, live: see `CPUOffloadPolicy`.
    alignment: as for `ZeroOptimizer`.
    find_unused_parameters: parameters without a gradient take part as zeros instead of raising, also all of a unit that
    no rank has used. A parameter that no rank has used is not stepped. Every rank must run the same units.
    ignored_params: neither sharded nor summed, here and in every `fully_shard` around this one: you do it yourself. Of
    other parameters that no `fully_shard` and no other wrapper has, the first backward pass raises UsageError.
    persistence_threshold: parameters of fewer elements stay whole and are gathered once after each step.
    expert_mesh: as `mesh`, for parameters that are cut over an axis ep (`ExpertParallel`): the ranks that hold the same
    experts. The unit is then two flat arrays, which are gathered and reduced over different ranks at the same time.
    """

    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009  it cannot change
    offload_policy: Any = None
    alignment: int = NORM_BLOCK
    find_unused_parameters: bool = False
    ignored_params: Collection[Parameter] = ()
    persistence_threshold: int = 0
    expert_mesh: Mesh | Comm | None = None

    @property
    def kinds(self) -> tuple[Any, Any]:
        """What makes a shard, and a unit."""
        return (Shard, OptionalUnit) if self.offload_policy is None else self.offload_policy.kinds


def shard_with_options(
    module: Module, mesh: Mesh | Comm, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Do the work of `fully_shard` with a mesh, or a part that stays whole, or options that the core does not know.

    mesh: a communicator, a mesh of one axis, or of two: (replicate, shard), hybrid sharding: shards over the second
    axis, equal copies over the first, along which reduced shards are all-reduced. settings: the arguments of
    `fully_shard` by name. A number g as `reshard_after_forward` keeps 1/g of a unit on each rank and gathers it for
    backward in groups of g neighbours (g divides the number of shards). options: the fields of `Sharding`; UsageError
    for another name.
    """
    known = ("mesh", *settings, *(field.name for field in fields(Sharding)))
    for name in options:
        if name not in known:
            raise UsageError(f"fully_shard has no option {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    chosen, op = Sharding(**options), operation_of(settings["reduction"])
    check_number("persistence_threshold", chosen.persistence_threshold)
    inside = (getattr(state, "ignored", ()) for state in states_of(module))
    ignored = set(chosen.ignored_params).union(*inside)

    # Who communicates: the ranks that share the shards, and those with equal copies.
    comm, replicas = _axes(mesh)
    guard = hooks.guard(op, *filter(None, (comm, replicas)))
    guard.shards(module, ignored)
    settings = {
        **settings,
        **{name: getattr(chosen, name) for name in ("mp_policy", "alignment", "find_unused_parameters")},
    }

    # What no module inside has taken yet makes one unit, experts another, and small parameters of both more of them.
    units = []
    for (expert, small), parameters in sorted(_parts(module, ignored, chosen).items(), key=lambda part: part[0]):
        over, copies = _axes(chosen.expert_mesh) if expert and chosen.expert_mesh is not None else (comm, replicas)
        make_shard, make_unit = chosen.kinds
        shard = make_shard(parameters, over, chosen.alignment)
        guard.wraps(
            "fully_shard", module if over is comm else None, shard.flat, settings, *filter(None, (over, copies))
        )
        unit = make_unit(shard, guard, gathers_of(over), settings["algorithm"], copies, chosen)
        unit.keep_parts(settings["reshard_after_forward"], small)
        units.append(unit)
    OptionalState(module, comm, units, guard, settings["prefetch"], chosen.mp_policy).ignored = ignored
    guard.covers(module, (*module.parameters(), *ignored))


def _parts(module: Module, ignored: set[Parameter], chosen: Sharding) -> dict[tuple[bool, bool], list[Parameter]]:
    """Return the parameters of each unit by (are they experts, are they small): those that no unit has yet."""
    parts: dict[tuple[bool, bool], list[Parameter]] = {}
    for p in module.parameters():
        if p.flat is None and p not in ignored:
            expert = chosen.expert_mesh is not None and p.layout is not None and "ep" in p.layout.axes
            parts.setdefault((expert, p.size < chosen.persistence_threshold), []).append(p)
    return parts


def _axes(mesh: Mesh | Comm) -> tuple[Comm, Comm | None]:
    """Return the communicators over which to shard, and over which shards are equal copies."""
    if not isinstance(mesh, Mesh):
        check_communicator(mesh, "fully_shard")
        return mesh, None
    if len(mesh.axis_names) > 2:
        raise UsageError(
            f"fully_shard takes a mesh of 1 axis, or of 2 (replicate, shard), not of {len(mesh.axis_names)}"
        )
    *copies, shard = (mesh[name] for name in mesh.axis_names)
    return shard, copies[0] if copies else None


class OptionalUnit(FSDPUnit):
    """A unit with other dtypes than its shard, parts that stay whole, copies of the shard, or a shard elsewhere.

    replicas: the ranks that hold equal copies of the shard, and have seen other rows (hybrid sharding). subgroup: what
    is left of the whole after its forward is a part, from which these neighbours gather it for backward. persistent: it
    stays whole always, and is gathered anew only after an update.
    """

    def __init__(
        self, shard: Shard, guard: Any, gathers: Comm, algorithm: str, replicas: Comm | None, chosen: Sharding
    ) -> None:
        self.find_unused, self.replicas = chosen.find_unused_parameters, replicas
        self.subgroup: Comm | None = None
        self.part: xp.Array | None = None  # what this rank keeps of the unit for its subgroup
        self.persistent = False
        self.brought: set[Parameter] = set()  # whose gradients this rank has brought in this backward pass

        # Rank 0's values count: along the replicas first, so that rank 0 of each shard group has them.
        if replicas is not None:
            with purpose("startup"):
                broadcast(replicas, shard.flat.data)
        super().__init__(shard, guard, gathers, algorithm)
        precision = chosen.mp_policy
        if precision.param_dtype is not None:
            self.flat.dtype = xp.dtype(precision.param_dtype)
        self.reduce_dtype = self.flat.dtype if precision.reduce_dtype is None else xp.dtype(precision.reduce_dtype)

    def keep_parts(self, reshard: bool | int, persistent: bool) -> None:
        """Set what stays of the unit: all, nothing, or, where `reshard` is a number, a part of that many neighbours."""
        self.keep, self.persistent, comm = reshard is False, persistent, self.shard.comm
        if isinstance(reshard, bool) or persistent:
            return
        check_whole("reshard_after_forward", reshard)
        if not 1 < reshard < comm.size or comm.size % reshard:
            raise UsageError(
                f"reshard_after_forward={reshard} with {comm.size} shards; a number must divide them and lie between 1"
                f" and {comm.size}; or pass True or False"
            )

        # With 8 shards and reshard 4: {0, 1, 2, 3} and {4, 5, 6, 7}.
        first = comm.rank // reshard * reshard
        self.subgroup = comm.group(range(first, first + reshard), f"reshard{first}")

    # --- the parameters ---

    def all_gather(self, whole: xp.Array, equal: str) -> Any:
        """Start to gather the values of all ranks into `whole`, from the shards or from parts of the subgroup."""
        # Kept in parts since forward: gather among the neighbours only, from parts of the size 1/g.
        if self.subgroup is not None and self.part is not None:
            return all_gather(self.subgroup, self.cast(self.part), out=whole, async_op=True, equal=equal)

        # The cast comes before the values cross any link: half precision halves the bytes there, too.
        return self.gather_shards(whole, equal)

    def gather_shards(self, whole: xp.Array, equal: str) -> Any:
        """Start to gather the shards of all ranks into `whole`."""
        return all_gather(self.gathers, self.cast(self.shard.data), out=whole, async_op=True, equal=equal)

    def cast(self, values: xp.Array) -> xp.Array:
        """Return values in the dtype in which the unit is gathered."""
        return track(downcast(values, self.flat.dtype), "communication")

    def finish_gather(self) -> None:
        """Wait for the gather in flight; the part that this rank has kept is not needed any more."""
        if self.gather is not None:
            super().finish_gather()
            self.part = None

    def release(self) -> None:
        """Drop the whole array, unless the unit is persistent."""
        if not self.persistent:
            super().release()

    def after_forward(self, recording: bool) -> None:
        """Release the unit, or keep of it what `reshard_after_forward` says."""
        # This rank's 1/g of the whole; what the neighbours keep makes it whole again for backward.
        if recording and self.subgroup is not None:
            size, rank = self.flat.padded_numel // self.subgroup.size, self.subgroup.rank
            self.part = track(xp.array(self.flat.data[rank * size : (rank + 1) * size]), "unsharded")
        super().after_forward(recording)

    # --- the gradient ---

    def reduce_now(self, root: Any, missing: list[Parameter]) -> None:
        """Start the reduction without the parameters that got no gradient: they are an error, or zeros."""
        if not self.find_unused:
            super().reduce_now(root, missing)
            return
        for parameter in missing:
            parameter.zero_fill()
        self.brought |= set(self.trainable).difference(missing)
        self.start_reduce(root)

    def destination(self) -> xp.Array:
        """Return the array for a sum: the shard's gradient, unless that has another dtype or memory."""
        shard = self.shard
        if self.reduce_dtype != shard.dtype:
            return track(xp.empty(shard.size, self.reduce_dtype, self.device), "communication")
        return super().destination()

    def reduce_scatter(self, whole: xp.Array, counts: list[int], out: xp.Array, equal: str) -> Any:
        """Start to sum each rank's part of `whole` there, in `out`, whose dtype the messages have."""
        return super().reduce_scatter(track(downcast(whole, out.dtype), "communication"), counts, out, equal)

    def finish_reduce(self, root: Any, piece: xp.Array) -> None:
        """Sum a reduction's result over the replicas, and move the sum to the device of the shard."""
        if self.find_unused:
            used = self.brought
            for comm in filter(None, (self.shard.comm, self.replicas)):
                used = used_anywhere(comm, self.trainable, used)
            self.shard.used = used | (self.shard.used or set())
        if self.replicas is not None:
            equal = root.guard.of_copies(self.shard, self.guard)
            with purpose("gradient_reduce"):
                all_reduce(self.replicas, piece, self.guard.op, algorithm=self.algorithm, equal=equal)
        self.deliver(piece)

    def deliver(self, piece: xp.Array) -> None:
        """Add a reduced gradient to the shard's, in its dtype."""
        super().deliver(downcast(piece, self.shard.dtype))

    def settle(self) -> None:
        """All gradients of a pass are reduced."""
        super().settle()
        self.brought = set()


class OptionalState(FSDPState):
    """The state of a module that computes in other dtypes than its caller."""

    def __init__(self, *arguments: Any) -> None:
        *others, self.precision = arguments
        self.ignored: set[Parameter] = set()  # the user takes care of these
        super().__init__(*others)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the module, cast before they are marked."""
        # Backward is done with the module as soon as its own gradients are computed, before those of the cast.
        return super().inputs(self.precision.inputs(args), self.precision.inputs(kwargs))

    def _post_forward(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Mark the module's results when they are cast."""
        return super()._post_forward(module, args, self.precision.outputs(output))
