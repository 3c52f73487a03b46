"""ZeRO 3: parameters, too, are kept as shards; a module's parameters exist whole only while it computes.

A *unit* is a module's parameters in one flat array (a block; what is left of the model is the last unit):

    forward    gather unit 1 | compute | release      gather unit 2 | compute | release     ...
    backward   ...    gather unit 2 | compute | reduce-scatter its gradient, release     gather unit 1 | ...
    step       an ordinary optimizer on the shards; nothing is gathered before the next forward needs it

Per unit and micro-batch, two gathers and one reduce-scatter: 3 Psi (n-1)/n from each rank, where data parallelism
sends 2. The gathers run in a separate stream: with `prefetch=d` the next d units are on their way while one
computes, which hides a gather that takes no longer than the computation, and costs the memory of d units.

This file is the interface; fsdp_state.py says when to gather, release and reduce, fsdp_unit.py how.
Sources: Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP, VLDB 2023.
Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_fully_shard_against_torch.py
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.base.limits import check_number, check_whole
from minidist.core.comm import Comm, Mesh, check_communicator
from minidist.core.nn.module import Module
from minidist.core.optim import NORM_BLOCK, FlatSlice
from minidist.core.parallel.flat_shards import DEVICE, Placement, Shard, sharded_flat
from minidist.core.parallel.fsdp_state import FSDPState, states_of, units_of
from minidist.core.parallel.fsdp_unit import FSDPUnit, Precision, Reduce, Reshard
from minidist.core.parallel.guard import new_guard, operation_of

# Communicator -> the stream of its all-gathers, so that they do not queue behind reductions. All models that are
# sharded over the same ranks have one, so that ranks that run two models in different orders meet, and are told.
_gathers: "WeakKeyDictionary[Comm, Comm]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Sharding:
    """The further arguments of `fully_shard`.

    reduction, algorithm, alignment: as for `ZeroOptimizer`; all units of a model have one reduction.
    find_unused_parameters: parameters without a gradient take part as zeros instead of raising, also all of a unit that
    no rank has used. A parameter that no rank has used is not stepped. Every rank must run the same units.
    ignored_params: neither sharded nor summed, here and in every `fully_shard` around this one: you do it yourself. Of
    other parameters that no `fully_shard` and no other wrapper has, the first backward pass raises UsageError.
    persistence_threshold: parameters of fewer elements stay whole and are gathered once after each step.
    expert_mesh: as `mesh`, for parameters that are cut over an axis ep (`ExpertParallel`): the ranks that hold the same
    experts. The unit is then two flat arrays, which are gathered and reduced over different ranks at the same time.
    """

    reduction: str = "mean"
    algorithm: str = "ring"
    alignment: int = NORM_BLOCK
    find_unused_parameters: bool = False
    ignored_params: Collection[Parameter] = ()
    persistence_threshold: int = 0
    expert_mesh: Mesh | Comm | None = None


def fully_shard(
    module: Module,
    *,
    mesh: Mesh | Comm,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    mp_policy: Precision = Precision(),  # noqa: B008  it cannot change
    offload_policy: Placement | None = None,
    **options: Any,
) -> Module:
    """Shard the parameters of `module` that no unit has yet, over the ranks of `mesh`; returns `module`. Bottom up:

        for block in model.transformer.h:
            fully_shard(block, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = AdamW(sharded_parameters(model), lr=3e-3)

    mesh: a communicator, a mesh of one axis, or of two: (replicate, shard), hybrid sharding: shards over the second
    axis, equal copies over the first, along which reduced shards are all-reduced. The same for all modules of a model.
    reshard_after_forward: True releases the unit after its forward and gathers it again for backward. False keeps it in
    between: 2 Psi bytes instead of 3, and the memory of data parallelism. A number g keeps 1/g of it on each rank and
    gathers it for backward in groups of g neighbours (g divides the number of shards).
    prefetch: how many modules are gathered ahead, in the order in which they ran last time (the first pass gathers none
    ahead); the outermost module's value counts. mp_policy: the dtypes of the unit, see `MixedPrecisionPolicy`; a nested
    module's own policy takes precedence. offload_policy: where shards of parameters and gradients, and so the
    optimizer, live: see `CPUOffloadPolicy`. options: the fields of `Sharding`.

    The arrays of parameters while they are whole are copies that the next gather replaces, and read-only. At
    construction rank 0 sends its parameters to all ranks (purpose `startup`). A step with k micro-batches sends from
    each rank (n-1)/n of 2 k Psi (purpose `parameter_gather`) and k Psi (`gradient_reduce`), Psi padded elements.
    """
    chosen = Sharding(**options)
    op = operation_of(chosen.reduction)
    check_whole("prefetch", prefetch)
    check_number("persistence_threshold", chosen.persistence_threshold)
    inside = states_of(module)
    if any(state.module is module for state in inside):
        raise UsageError(f"{module.name or type(module).__name__!r} is sharded already; call fully_shard once a module")
    ignored = set(chosen.ignored_params).union(*(state.ignored for state in inside))

    # Who communicates: the ranks that share the shards, and those with equal copies.
    comm, replicas = _axes(mesh)
    guard = new_guard(op, *filter(None, (comm, replicas)))
    guard.shards(module, ignored)
    settings = {
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
        "mp_policy": mp_policy,
        **{name: getattr(chosen, name) for name in ("reduction", "algorithm", "alignment", "find_unused_parameters")},
    }

    # What no module inside has taken yet makes one unit, experts another, and small parameters of both more of them.
    units = []
    for (expert, small), parameters in sorted(_parts(module, ignored, chosen).items(), key=lambda part: part[0]):
        over, copies = _axes(chosen.expert_mesh) if expert and chosen.expert_mesh is not None else (comm, replicas)
        shard = Shard(sharded_flat(parameters, over, chosen.alignment), over, chosen.alignment)
        ranks = filter(None, (over, copies))
        guard.wraps("fully_shard", module if over is comm else None, shard.flat, settings, *ranks)
        reduce = Reduce(op, chosen.algorithm, copies, chosen.find_unused_parameters)
        if over not in _gathers:
            _gathers[over] = over.dup()
        reshard = _reshard(over, reshard_after_forward, small)
        units.append(FSDPUnit(shard, guard, _gathers[over], reduce, reshard, mp_policy, offload_policy or DEVICE))

    # Its hooks attach it to the module.
    FSDPState(module, comm, units, guard, prefetch, mp_policy, replicas, ignored)
    return module


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


def _reshard(comm: Comm, reshard: bool | int, persistent: bool) -> Reshard:
    """Return what stays of a unit: all, nothing, or, where `reshard` is a number, a part of that many neighbours."""
    if isinstance(reshard, bool) or persistent:
        return Reshard(keep=reshard is False, persistent=persistent)
    check_whole("reshard_after_forward", reshard)
    if not 1 < reshard < comm.size or comm.size % reshard:
        raise UsageError(
            f"reshard_after_forward={reshard} with {comm.size} shards; a number must divide them and lie between 1 and "
            f"{comm.size}; or pass True or False"
        )

    # With 8 shards and reshard 4: {0, 1, 2, 3} and {4, 5, 6, 7}.
    first = comm.rank // reshard * reshard
    return Reshard(subgroup=comm.group(range(first, first + reshard), f"reshard{first}"))


def shards_of(module: Module) -> list[Shard]:
    """Return this rank's shard of each unit."""
    return [unit.shard for unit in units_of(module)]


def sharded_parameters(module: Module) -> list[FlatSlice]:
    """Return the slices for an ordinary optimizer: `AdamW(sharded_parameters(model), lr=3e-3)`."""
    return [piece for shard in shards_of(module) for piece in shard.slices()]
