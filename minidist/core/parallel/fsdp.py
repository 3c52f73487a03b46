"""ZeRO 3: parameters, too, are kept as shards; a module's parameters exist whole only while it computes.

A *unit* is a module's parameters in one flat array (a block; what is left of the model is the last unit):

    forward    gather unit 1 | compute | release      gather unit 2 | compute | release     ...
    backward   ...    gather unit 2 | compute | reduce-scatter its gradient, release     gather unit 1 | ...
    step       an ordinary optimizer on the shards; nothing is gathered before the next forward needs it

Per unit of Psi padded elements and micro-batch, two gathers and one reduce-scatter: 3 Psi (n-1)/n elements from each
rank, where data parallelism sends 2. The gathers run in a separate stream: with `prefetch=d` the next d units are on
their way while one computes, which hides a gather that takes no longer than the computation, and costs the memory of d
units.

This file is the interface; fsdp_state.py says when to gather, release and reduce, fsdp_unit.py how.
Sources: Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP, VLDB 2023.
Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_fully_shard_against_torch.py
"""

from typing import Any
from weakref import WeakKeyDictionary

from minidist.core.base import hooks
from minidist.core.comm import Comm, Mesh, check_communicator
from minidist.core.nn.module import Module
from minidist.core.optim import FlatSlice
from minidist.core.parallel.flat_shards import Shard
from minidist.core.parallel.fsdp_state import FSDPState, states_of, units_of
from minidist.core.parallel.fsdp_unit import FSDPUnit
from minidist.core.parallel.gradients import new_guard, operation_of

# Communicator -> the stream of its all-gathers, so that they do not queue behind reductions. All models that are
# sharded over the same ranks have one, so that ranks that run two models in different orders meet, and are told.
_gathers: "WeakKeyDictionary[Comm, Comm]" = WeakKeyDictionary()


def fully_shard(
    module: Module,
    *,
    mesh: Mesh | Comm,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    reduction: str = "mean",
    algorithm: str = "ring",
    **options: Any,
) -> Module:
    """Shard the parameters of `module` that no unit has yet, over the ranks of `mesh`; returns `module`. Bottom up:

        for block in model.transformer.h:
            fully_shard(block, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = AdamW(sharded_parameters(model), lr=3e-3)

    mesh: the communicator of the ranks, the same for all modules of a model. reshard_after_forward: True releases the
    unit after its forward and gathers it again for backward. False keeps it in between: 2 Psi elements instead of 3,
    and the memory of data parallelism. prefetch: how many modules are gathered ahead, in the order in which they ran
    last time (the first pass gathers none ahead); the outermost module's value counts. reduction, algorithm: as for
    `ZeroOptimizer`; all units of a model have one reduction. options: see `minidist.parallel.fsdp_options.Sharding`,
    with which a mesh may have two axes, and reshard_after_forward be a number.

    The arrays of parameters while they are whole are copies that the next gather replaces, and read-only. At
    construction rank 0 sends its parameters, and 16 B for each unit (`ReplicaGuard`), to all ranks (purpose `startup`).
    A step with k micro-batches sends from each rank (n-1)/n of 2 k Psi elements (purpose `parameter_gather`) and of k
    Psi (`gradient_reduce`).
    """
    op = operation_of(reduction)
    hooks.check_whole("prefetch", prefetch)
    settings = {
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
        "reduction": reduction,
        "algorithm": algorithm,
    }
    plain = isinstance(reshard_after_forward, bool) and all(type(state) is FSDPState for state in states_of(module))
    if options or isinstance(mesh, Mesh) or not plain:
        hooks.shard_with_options(module, mesh, settings, options)
        return module
    check_communicator(mesh, "fully_shard")

    # What no module inside has taken yet makes one unit. There may be nothing left.
    guard = new_guard(op, mesh)
    guard.shards(module, ())
    parameters = [p for p in module.parameters() if p.flat is None]
    units = []
    if parameters:
        shard = Shard(parameters, mesh)
        guard.wraps("fully_shard", module, shard.flat, settings, mesh)
        units = [FSDPUnit(shard, guard, gathers_of(mesh), algorithm, keep=not reshard_after_forward)]

    # Its hooks attach it to the module.
    FSDPState(module, mesh, units, guard, prefetch)
    return module


def gathers_of(comm: Comm) -> Comm:
    """Return the stream of all-gathers over the ranks of `comm`. Every rank must call it."""
    if comm not in _gathers:
        _gathers[comm] = comm.dup()
    return _gathers[comm]


def shards_of(module: Module) -> list[Shard]:
    """Return this rank's shard of each unit."""
    return [unit.shard for unit in units_of(module)]


def sharded_parameters(module: Module) -> list[FlatSlice]:
    """Return the slices for an ordinary optimizer: `AdamW(sharded_parameters(model), lr=3e-3)`."""
    return [piece for shard in shards_of(module) for piece in shard.slices()]
