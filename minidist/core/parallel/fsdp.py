"""ZeRO 3: parameters, too, are kept as shards; a module's parameters exist whole only while it computes.

A *unit* is a module's parameters in one flat array (a block; what is left of the model is the last unit):

    forward    gather unit 1 | compute | release      gather unit 2 | compute | release     ...
    backward   ...    gather unit 2 | compute | reduce-scatter its gradient, release     gather unit 1 | ...
    step       an ordinary optimizer on the shards; nothing is gathered before the next forward needs it

Per unit and micro-batch, two gathers and one reduce-scatter: 3 Psi (n-1)/n from each rank, where data parallelism
sends 2. The gathers run in a separate stream: with `prefetch=d` the next d units are on their way while one
computes, which hides a gather that takes no longer than the computation, and costs the memory of d units.

This file is the interface; fsdp_state.py says when to gather, release and reduce, fsdp_param_group.py how.
Sources: Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP, VLDB 2023.
Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_fully_shard_against_torch.py
"""

from collections.abc import Collection, Iterator

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError, quoted
from minidist.core.base.limits import check_number, check_whole
from minidist.core.comm import Comm, Mesh, check_communicator
from minidist.core.nn.module import Module
from minidist.core.optim import NORM_BLOCK, FlatSlice
from minidist.core.parallel.flat_shards import DEVICE, Placement, Shard, sharded_flat
from minidist.core.parallel.fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
    Precision,
    Reduce,
    Reshard,
    stream_of_gathers,
)
from minidist.core.parallel.fsdp_state import FSDPState, param_groups_of, states_of
from minidist.core.parallel.guard import new_guard

OPERATIONS = {"mean": "avg", "sum": "sum"}  # of a reduction
Axes = tuple[Comm, Comm | None]  # over which a unit is sharded, and over which its shards are equal copies
Part = tuple[list[Parameter], bool, Comm, Comm | None]  # parameters, whether they stay whole, and their axes


def fully_shard(
    module: Module,
    *,
    mesh: Mesh | Comm,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    persistence_threshold: int = 0,
    mp_policy: Precision = Precision(),  # noqa: B008  it cannot change
    offload_policy: Placement | None = None,
    reduction: str = "mean",
    algorithm: str = "ring",
    alignment: int = NORM_BLOCK,
    find_unused_parameters: bool = False,
    ignored_params: Collection[Parameter] = (),
    expert_mesh: Mesh | Comm | None = None,
) -> Module:
    """Shard the parameters of `module` that no unit has yet, over the ranks of `mesh`; returns `module`. Bottom up:

        for block in model.transformer.h:
            fully_shard(block, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = AdamW(sharded_parameters(model), lr=3e-3)

    mesh: a communicator, or a mesh of one axis, or of two: (replicate, shard), hybrid sharding: shards over the second
    axis, equal copies over the first, along which the reduced shards are summed with an all-reduce. The same for all
    modules of a model.
    reshard_after_forward: True releases the unit after its forward and gathers it again for backward. False keeps it in
    between: 2 Psi bytes instead of 3, and the memory of data parallelism. A number g keeps 1/g of it on each rank and
    gathers it for backward in groups of g neighbours (g divides the number of shards).
    prefetch: how many modules are gathered ahead, in the order in which they ran last time (the first pass gathers none
    ahead); the outermost module's value counts.
    persistence_threshold: parameters of fewer elements stay whole and are gathered once after each step.
    mp_policy: in which dtypes the unit is gathered, computes and is reduced, see `MixedPrecisionPolicy`; a nested
    module's own policy takes precedence.
    offload_policy: where shards of parameters and gradients, and so the optimizer, live: see `CPUOffloadPolicy`.
    reduction, algorithm, alignment: as for `ZeroOptimizer`; all units of a model have one reduction.
    find_unused_parameters: parameters without a gradient take part as zeros instead of raising, also all of a unit that
    no rank has used. A parameter that no rank has used is not stepped. Every rank must run the same units.
    ignored_params: neither sharded nor summed, here and in every `fully_shard` around this one: you do it yourself. Of
    other parameters that no `fully_shard` and no other wrapper has, the first backward pass raises UsageError.
    expert_mesh: as `mesh`, for parameters that are cut over an axis ep (`ExpertParallel`): the ranks that hold the same
    experts. The unit is then two flat arrays, which are gathered and reduced over different ranks at the same time.

    The arrays of parameters while they are whole are copies that the next gather replaces, and read-only. At
    construction rank 0 sends its parameters to all ranks (purpose `startup`). A step with k micro-batches sends from
    each rank (n-1)/n of 2 k Psi (purpose `parameter_gather`) and k Psi (`gradient_reduce`), Psi padded elements.
    """
    if reduction not in OPERATIONS:
        raise UsageError(f"reduction={quoted(reduction)}; it must be 'mean' or 'sum'")
    check_whole("prefetch", prefetch)
    check_number("persistence_threshold", persistence_threshold)
    if any(state.module is module for state in states_of(module)):
        raise UsageError(f"{module.name or type(module).__name__!r} is sharded already; call fully_shard once a module")

    ignored = set(ignored_params).union(*(state.ignored for state in states_of(module)))

    # Who communicates: the ranks that share the shards, and those with equal copies.
    comm, replicas = _axes(mesh)
    guard = new_guard(OPERATIONS[reduction], *filter(None, (comm, replicas)))
    guard.shards(module, ignored)
    context = FSDPCommContext(guard)
    settings = {
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
        "mp_policy": mp_policy,
        "reduction": reduction,
        "algorithm": algorithm,
        "alignment": alignment,
        "find_unused_parameters": find_unused_parameters,
    }

    # What no module inside has taken yet makes one group, experts another, and small parameters of both more of them.
    left = [parameter for parameter in module.parameters() if parameter.flat is None and parameter not in ignored]
    groups = []
    for parameters, persistent, over, copies in _parts(left, persistence_threshold, (comm, replicas), expert_mesh):
        shard, ranks = Shard(sharded_flat(parameters, over, alignment), over, alignment), filter(None, (over, copies))
        guard.wraps("fully_shard", module if over is comm else None, shard.flat, settings, *ranks)
        group = FSDPParamGroup(
            shard,
            context,
            stream_of_gathers(over),
            Reduce(OPERATIONS[reduction], algorithm, copies, find_unused_parameters),
            _reshard(over, reshard_after_forward, persistent),
            mp_policy,
            offload_policy or DEVICE,
        )
        groups.append(group)

    # Its hooks attach it to the module.
    FSDPState(module, comm, groups, context, prefetch, mp_policy, replicas, ignored)
    return module


def _parts(left: list[Parameter], threshold: int, axes: Axes, expert_mesh: Mesh | Comm | None) -> Iterator[Part]:
    """Yield the parameters that make one group each: experts have fewer replicas, small ones stay whole."""
    experts = set() if expert_mesh is None else {p for p in left if p.layout is not None and "ep" in p.layout.axes}
    of_axes = [(axes, [p for p in left if p not in experts])]
    if experts and expert_mesh is not None:
        of_axes.append((_axes(expert_mesh), [p for p in left if p in experts]))
    for (comm, replicas), parameters in of_axes:
        for persistent in (False, True):
            chosen = [parameter for parameter in parameters if (parameter.size < threshold) is persistent]
            if chosen:
                yield chosen, persistent, comm, replicas


def fsdp_gather_volume(parameters: int, ranks: int, copies: int = 1) -> int:
    """Return the elements that all `ranks` together send in one gather of units of `parameters` elements.

    copies: of each shard (hybrid sharding), so that a gather runs among ranks / copies ranks.
    """
    return (ranks - copies) * parameters


def fsdp_volume(
    parameters: int, ranks: int, *, copies: int = 1, reshard: bool | int = True, replayed: bool = False
) -> dict[str, int]:
    """Return the elements that all `ranks` together send per micro-batch, for units of `parameters` padded elements.

    reshard: `reshard_after_forward`. replayed: the forward runs again in backward and gathers again (recomputation of
    whole stages). Persistent units are reduced too, but gathered once per step only: see `fsdp_gather_volume`.
    """
    # A gather for forward, and one for backward: among all again, among groups of `reshard` neighbours, or none.
    gather = fsdp_gather_volume(parameters, ranks, copies)
    if isinstance(reshard, bool):
        again = gather if reshard else 0
    else:
        # ranks / g groups; in each of them (g-1)/g of the elements reach each of g ranks.
        again = ranks // reshard * (reshard - 1) * parameters

    # A reduce-scatter over the shards, and an all-reduce of each shard over its copies.
    reduced = (ranks - copies) * parameters + 2 * (copies - 1) * parameters
    return {"gradient_reduce": reduced, "parameter_gather": gather + again + (gather if replayed else 0)}


def _axes(mesh: Mesh | Comm) -> Axes:
    """Return the communicators over which to shard, and over which shards are equal copies."""
    if not isinstance(mesh, Mesh):
        check_communicator(mesh, "fully_shard")
        return mesh, None
    if len(mesh.axis_names) == 1:
        return mesh[mesh.axis_names[0]], None
    if len(mesh.axis_names) == 2:
        return mesh[mesh.axis_names[1]], mesh[mesh.axis_names[0]]
    raise UsageError(f"fully_shard takes a mesh of 1 axis, or of 2 (replicate, shard), not of {len(mesh.axis_names)}")


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
    return [group.shard for group in param_groups_of(module)]


def sharded_parameters(module: Module) -> list[FlatSlice]:
    """Return the slices for an ordinary optimizer: `AdamW(sharded_parameters(model), lr=3e-3)`."""
    return [piece for shard in shards_of(module) for piece in shard.slices()]
