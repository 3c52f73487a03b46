"""ZeRO 3: parameters, too, are kept as shards; a unit's parameters exist whole only while it computes.

A *unit* is a module's parameters in one flat array (a block; what is left of the model is the last unit):

    forward    gather unit 1 | compute | release      gather unit 2 | compute | release     ...
    backward   ...    gather unit 2 | compute | reduce-scatter its gradient, release     gather unit 1 | ...
    step       an ordinary optimizer on the shards; nothing is gathered before the next forward needs it

Two gathers and one reduce-scatter for each unit and micro-batch: 3 Psi (n-1)/n from each rank, where data parallelism
sends 2. The gathers run in a lane of their own: with `prefetch=d` the next d units are on their way while one computes,
which hides a gather that takes no longer than the computation, and costs the memory of d units.

Nothing here touches the engine: a tape node keeps the Parameter and not its array, so dropping the flat array frees the
memory, and a marker on the unit's output tells in backward that it is needed again.
Sources: Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from minidist.autograd import is_grad_enabled, mark_all, meter
from minidist.autograd.backward import current_pass
from minidist.base.errors import UsageError
from minidist.comm import Comm, Mesh
from minidist.nn.module import Module
from minidist.optim import NORM_BLOCK, FlatSlice
from minidist.parallel.flat_shards import Shard, sharded_flat
from minidist.parallel.fsdp_param_group import Unit
from minidist.parallel.host_pool import Transfer
from minidist.parallel.mixed_precision import MixedPrecisionPolicy, cast_floats
from minidist.parallel.offload import CPUOffloadPolicy

_STATE = "_fully_sharded"  # the attribute of a module that has been sharded


def fully_shard(
    module: Module,
    *,
    mesh: Mesh | Comm,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    persistence_threshold: int = 0,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  it cannot change
    offload_policy: CPUOffloadPolicy | None = None,
    reduction: str = "mean",
    algorithm: str = "ring",
    alignment: int = NORM_BLOCK,
) -> Module:
    """Shard the parameters of `module` that no unit has yet, over the ranks of `mesh`; returns `module`. Bottom up:

        for block in model.transformer.h:
            fully_shard(block, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = AdamW(sharded_parameters(model), lr=3e-3)

    mesh: a communicator, or a mesh of one axis, or of two: (replicate, shard), hybrid sharding: shards over the second
    axis, equal copies over the first, along which the reduced shards are summed with an all-reduce.
    reshard_after_forward: True releases the unit after its forward and gathers it again for backward. False keeps it in
    between: 2 Psi bytes instead of 3, and the memory of data parallelism. A number g keeps 1/g of it on each rank and
    gathers it for backward in groups of g neighbours (g divides the number of shards).
    prefetch: how many modules are gathered ahead, in the order in which they ran last time (the first pass gathers none
    ahead); that of the outermost module counts.
    persistence_threshold: parameters of fewer elements stay whole and are gathered once after each step.
    mp_policy: in which dtypes the unit is gathered, computes and is reduced, see `MixedPrecisionPolicy`; of a module
    inside another one its own counts.
    offload_policy: shards of parameters and gradients, and so the optimizer, live in host memory: a shard goes up
    before its unit is gathered, the reduced gradient of it comes down, and both are hidden as the gather is.
    reduction, algorithm, alignment: as for `ZeroOptimizer`.

    At construction rank 0 sends its parameters to everybody (purpose `startup`). A step with k micro-batches sends from
    each rank (n-1)/n of 2 k Psi (purpose `parameter_gather`) and k Psi (`gradient_reduce`), Psi padded elements.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction={reduction!r}; it must be 'mean' or 'sum'")
    if prefetch < 0 or persistence_threshold < 0:
        raise UsageError(
            f"prefetch {prefetch} and persistence_threshold {persistence_threshold}; neither may be below 0"
        )
    if _STATE in vars(module):
        raise UsageError(f"{module.name or type(module).__name__!r} is sharded already; call fully_shard once a module")
    comm, replicas = _axes(mesh)
    group = _group(comm, reshard_after_forward)
    state = State(module, comm, prefetch, mp_policy)
    left = [parameter for parameter in module.parameters() if parameter.flat is None]
    for persistent in (False, True):
        chosen = [parameter for parameter in left if (parameter.size < persistence_threshold) is persistent]
        if chosen:
            unit = Unit(
                Shard(sharded_flat(chosen, comm, alignment), comm, alignment),
                state,
                replicas=replicas,
                group=None if persistent else group,
                keep=reshard_after_forward is False,
                persistent=persistent,
                op="avg" if reduction == "mean" else "sum",
                algorithm=algorithm,
                pool=None if offload_policy is None else offload_policy.pool,
            )
            state.units.append(unit)
    vars(module)[_STATE] = state
    for inner in state.states():
        inner.root = state
    vars(module)["forward"] = partial(state.forward, module.forward)
    return module


def _axes(mesh: Mesh | Comm) -> tuple[Comm, Comm | None]:
    """The communicators over which to shard, and over which shards are copies."""
    if isinstance(mesh, Comm):
        return mesh, None
    if len(mesh.axis_names) == 1:
        return mesh[mesh.axis_names[0]], None
    if len(mesh.axis_names) == 2:
        return mesh[mesh.axis_names[1]], mesh[mesh.axis_names[0]]
    raise UsageError(f"fully_shard takes a mesh of 1 axis, or of 2 (replicate, shard), not of {len(mesh.axis_names)}")


def _group(comm: Comm, reshard: bool | int) -> Comm | None:
    """The neighbours among which a unit stays split between forward and backward, when a number was given."""
    if isinstance(reshard, bool):
        return None
    if not 1 < reshard < comm.size or comm.size % reshard:
        raise UsageError(
            f"reshard_after_forward={reshard} with {comm.size} shards; a number must divide them and lie between 1 and "
            f"{comm.size}; or pass True or False"
        )
    first = comm.rank // reshard * reshard
    return comm.group(range(first, first + reshard), f"reshard{first}")


class State:
    """A sharded module's units, and, in the outermost module, what all of them share: order, lane and reduction."""

    def __init__(self, module: Module, comm: Comm, prefetch: int, policy: MixedPrecisionPolicy) -> None:
        self.module, self.comm, self.prefetch, self.policy = module, comm, prefetch, policy
        self.units: list[Unit] = []  # none, one, or, with persistent parameters, two
        self.root = self  # the state of the outermost module, which the others ask
        self.gathers = comm.dup()  # gathers have a lane of their own, so that they do not queue behind reductions
        self.order: list[State] = []  # as forwards began in the last pass
        self.finished: list[State] = []  # as they ended
        self.began: list[State] = []
        self.ended: list[State] = []
        self.in_backward = False
        self.reducing: Unit | None = None  # at most one reduction travels
        self.descending: tuple[Unit, Transfer] | None = None  # and at most one reduced gradient, to the host

    def states(self) -> "list[State]":
        """Of this module and all below it, in the order of the tree."""
        return [vars(module)[_STATE] for module in self.module.modules() if _STATE in vars(module)]

    def forward(self, compute: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The module's forward between a gather and a release, its inputs and outputs marked for backward."""
        root, replaying = self.root, self.root.in_backward
        self._advance()
        if not replaying:
            if self is root:
                self.began, self.ended = [], []
            root.began.append(self)
        self._gather()
        if not replaying:
            self._prefetch(root.order)
        recording = is_grad_enabled()
        if self.policy.cast_forward_inputs:
            arguments, keywords = (cast_floats(value, self.policy.param_dtype) for value in (arguments, keywords))
        if recording:
            arguments = mark_all(arguments, f"input of {self.module.name or 'model'}", self._after_backward)
        result = cast_floats(compute(*arguments, **keywords), self.policy.output_dtype)
        self._advance()
        if recording:
            result = mark_all(result, f"output of {self.module.name or 'model'}", self._before_backward)
        if not replaying:  # recomputation happens in backward, which needs the unit at once
            for unit in self.units:
                unit.after_forward(recording)
            root.ended.append(self)
            if self is root:
                self.order, self.finished = self.began, self.ended
        return result

    def _before_backward(self) -> None:
        """Backward has reached the module's output: its parameters are needed, and soon those of the one before it."""
        walk: Any = current_pass.get()
        self.root.in_backward = True
        self._advance()
        walk.at_end(self.root, self.root.end_backward)
        if walk.after_node is None:
            walk.after_node = self.comm.progress
        self._gather()
        self._prefetch(self.root.finished[::-1])
        for unit in self.units:
            unit.differentiating = True

    def _after_backward(self) -> None:
        """Backward has reached the module's input: everything inside is done."""
        self._advance()
        for unit in self.units:
            unit.after_backward()

    def end_backward(self) -> None:
        """The pass is over: what has no marked input (it began with tokens) is done too. Nothing stays whole."""
        self._advance()
        units = [unit for state in self.states() for unit in state.units]
        for unit in units:
            unit.after_backward()
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.settle()
        self.in_backward = False
        for unit in units:
            unit.end_pass()

    def settle(self) -> None:
        """A gradient that is on its way to the host is there, and added to what earlier micro-batches brought."""
        if self.descending is not None:
            (unit, crossing), self.descending = self.descending, None
            unit._add(crossing.wait())

    def _gather(self) -> None:
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.finish_gather()

    def _prefetch(self, order: "list[State]") -> None:
        """Start to gather the modules that come next in `order`."""
        if self in order:
            place = order.index(self) + 1
            for following in order[place : place + self.root.prefetch]:
                for unit in following.units:
                    unit.start_gather()

    def _advance(self) -> None:
        """Let virtual time pass for what has been computed so far."""
        current = meter.get()
        if current is not None:
            self.comm.compute(current.take(), name="backward" if self.root.in_backward else "forward")


def units_of(module: Module) -> list[Unit]:
    """The units of a sharded module and of those inside it, in the order of the module tree."""
    states = [vars(m)[_STATE] for m in module.modules() if _STATE in vars(m)]
    if not states:
        raise UsageError(f"{type(module).__name__} is not sharded; call fully_shard(module, mesh=comm) first")
    return [unit for state in states for unit in state.units]


def shards_of(module: Module) -> list[Shard]:
    """This rank's shard of each unit."""
    return [unit.shard for unit in units_of(module)]


def sharded_parameters(module: Module) -> list[FlatSlice]:
    """What an ordinary optimizer takes: `AdamW(sharded_parameters(model), lr=3e-3)`."""
    return [piece for shard in shards_of(module) for piece in shard.slices()]
