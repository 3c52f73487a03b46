"""ZeRO 3: parameters, too, are kept as shards; a module's parameters exist whole only while it computes.

A *unit* is a module's parameters in one flat array (a block; what is left of the model is the last unit):

    forward    [1] gather unit 1 | module computes | [2] release          gather unit 2 | ...
    backward   [3] gather | its gradients are computed | [4] reduce-scatter them, release
               [5] at the end of the pass, finish what is in flight
    weights    [6] of a pass that deferred weight gradients: reduce-scatter each module's when its last one is there
    step       an ordinary optimizer on the shards; nothing is gathered before the next forward needs it

Per unit of Psi padded elements and micro-batch, two gathers and one reduce-scatter: 3 Psi (n-1)/n elements from each
rank, where data parallelism sends 2. The gathers run in a stream: with `prefetch=d` the next d units are on their way
while one computes, which hides a gather that takes no longer than the computation, and costs the memory of d units.

[1] and [2] are forward hooks. They mark the module's inputs and outputs on the tape, and backward calls [3] when the
gradients of the outputs are complete and [4] when those of the inputs are. Gathers and reductions have a start and a
finish, so that messages are sent while something computes:

    shard ── start_gather ▶ arriving ── finish_gather ▶ whole (the module computes) ── release ▶ shard
    whole gradient ── start_reduce ▶ in flight ── finish_reduce ▶ added to the shard's gradient

Sources: Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP, VLDB 2023.

Proved by: tests/parallel/test_fully_shard.py, tests/parallel/test_fully_shard_against_torch.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from minidist.core.autograd import (
    BackwardObserver,
    BackwardPass,
    Parameter,
    backward_hooks,
    current_pass,
    is_grad_enabled,
)
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import all_gather, broadcast, reduce_scatter
from minidist.core.comm import Comm, Mesh, Work, check_communicator
from minidist.core.nn.module import Module
from minidist.core.optim import FlatSlice
from minidist.core.parallel.data_parallel import operation_of
from minidist.core.parallel.zero import Shard

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
    last time; the outermost module's value counts. reduction, algorithm: as for `ZeroOptimizer`, equal for all units.
    options: see `minidist.parallel.fsdp_options.Sharding`, with which a mesh may have two axes, and
    reshard_after_forward be a number.

    While parameters are whole their arrays are read-only copies. At construction rank 0 sends its parameters, and 16 B
    for each unit (`ReplicaGuard`), to all ranks (purpose `startup`). A step with k micro-batches sends from each rank
    (n-1)/n of 2 k Psi elements (purpose `parameter_gather`) and of k Psi (`gradient_reduce`).
    """
    hooks.refusals().check_module("fully_shard", module, "mesh=comm")
    op = operation_of(reduction)
    hooks.check_whole("prefetch", prefetch)
    settings: dict[str, Any] = {
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
    guard = hooks.guard(op, mesh)
    guard.shards(module, ())
    parameters = [p for p in module.parameters() if p.flat is None]
    units = []
    if parameters:
        shard = Shard(parameters, mesh)
        guard.wraps("fully_shard", module, shard.flat, settings, mesh)
        units = [FSDPUnit(shard, guard, gathers_of(mesh), algorithm, keep=not reshard_after_forward)]
    FSDPState(module, mesh, units, guard, prefetch)
    return module


def gathers_of(comm: Comm) -> Comm:
    """Return the stream of all-gathers over the ranks of `comm`. Every rank must call it."""
    if comm not in _gathers:
        _gathers[comm] = comm.dup()
    return _gathers[comm]


def states_of(module: Module) -> "list[FSDPState]":
    """Return the states of `module` and of the modules inside it that have one, in the order of the module tree."""
    return [state for m in module.modules() if (state := vars(m).get("fsdp_state")) is not None]


def units_of(module: Module) -> "list[FSDPUnit]":
    """Return the units of a sharded module and of those inside it, in the order of the module tree."""
    states = states_of(module) if isinstance(module, Module) else []
    if not states:
        raise UsageError(f"{type(module).__name__} is not sharded; call fully_shard(module, mesh=comm) first")
    return [unit for state in states for unit in state.units]


def shards_of(module: Module) -> list[Shard]:
    """Return this rank's shard of each unit."""
    return [unit.shard for unit in units_of(module)]


def sharded_parameters(module: Module) -> list[FlatSlice]:
    """Return the slices for an ordinary optimizer: `AdamW(sharded_parameters(model), lr=3e-3)`."""
    return [piece for shard in shards_of(module) for piece in shard.slices()]


class FSDPUnit:
    """This rank's shard of a unit, and what of it is in flight. guard: of the `fully_shard` that makes the unit.

    gathers: the stream of its gathers. algorithm: of its reductions. keep: stay whole from forward until backward.
    Methods take the `FSDPState` of the outermost module, `root`.
    """

    def __init__(self, shard: Shard, guard: Any, gathers: Comm, algorithm: str, keep: bool = False) -> None:
        self.shard, self.flat, self.guard, self.gathers = shard, shard.flat, guard, gathers
        self.algorithm, self.keep = algorithm, keep
        self.trainable = [parameter for parameter in self.flat.parameters if parameter.requires_grad]

        self.gather: tuple[Work, xp.Array] | None = None  # the gather in flight, and the array that it writes to
        self.version = -1  # of the values that were gathered last
        self.differentiating = False  # backward has reached the module's output and not yet its input
        self.left = dict.fromkeys(self.trainable)  # not reduced yet in this pass, or, if deferred, not computed yet

        # Rank 0's values count. From here on the shard has a separate array, and the whole exists only while it is
        # gathered; `device`, an empty array, says on which device.
        with purpose("startup"):
            broadcast(shard.comm, self.flat.data)
        self.device = xp.empty(0, self.flat.dtype, self.flat.data)
        shard.detach()
        self.flat.release()

    def start_gather(self, root: Any) -> None:
        """Start to gather the latest values, unless they are here or on their way."""
        # It may be on its way already (prefetch), or still whole with the latest values (not resharded).
        if self.gather is not None or (not self.flat.released and self.version == self.flat.version):
            return
        if not self.flat.released:
            self.flat.release()

        whole = track(xp.empty(self.flat.padded_numel, self.flat.dtype, self.device), "unsharded")
        with purpose("parameter_gather"):
            self.gather = self.all_gather(whole, root.guard.of_unit(self.flat, self.guard)), whole

    def all_gather(self, whole: xp.Array, equal: str) -> Any:
        """Start to gather the values of all ranks into `whole`; return what waits for it."""
        return all_gather(self.gathers, self.shard.data, out=whole, async_op=True, equal=equal)

    def finish_gather(self) -> None:
        """Wait for the gather in flight and make the parameters views of what came."""
        if self.gather is not None:
            work, whole = self.gather
            work.wait()
            # A write into the gathered copy (`p.data[...] = x`) would be lost with it, so NumPy refuses it.
            if type(whole) is np.ndarray:
                whole.flags.writeable = False
            self.flat.bind(whole)
            self.gather, self.version = None, self.flat.version

    def release(self) -> None:
        """Drop the whole array."""
        if not self.flat.released:
            self.flat.release()

    def after_forward(self, recording: bool) -> None:
        """Release the unit, unless it stays whole until backward."""
        if not (recording and self.keep):
            self.release()

    def after_backward(self, root: Any) -> None:
        """Backward is done with the module: start to reduce the gradient, and release the unit."""
        if not self.differentiating:
            return
        self.differentiating = False
        # In a pass with a store the weight gradients are computed later; they need no weights.
        if root.running.store is None and self.trainable:
            self.reduce_now(root, [parameter for parameter in self.trainable if parameter.gradient.local is None])
        self.release()

    def reduce_now(self, root: Any, missing: list[Parameter]) -> None:
        """Start the reduction; parameters that got no gradient are an error."""
        for parameter in missing:
            self.guard.unused(
                self.shard.comm.rank, parameter, "its unit cannot be reduced", "freeze it before fully_shard"
            )
        self.start_reduce(root)

    def start_reduce(self, root: Any) -> None:
        """Start the reduce-scatter of the gradient and drop the whole one, after the reduction before it has ended."""
        # At most one reduction is in flight, so whole gradients of at most one unit are in memory besides this one's.
        root.finish_reduction()

        # (padded elements,) -> (padded elements / ranks,): each rank receives the sum of its shard.
        counts, equal = [self.shard.size] * self.shard.comm.size, root.guard.of_unit(self.flat, self.guard)
        with purpose("gradient_reduce"):
            work = self.reduce_scatter(self.flat.grad, counts, self.destination(), equal)
        self.flat.release_grad()
        root.reducing, self.left = (self, work), {}

    def reduce_scatter(self, whole: xp.Array, counts: list[int], out: xp.Array, equal: str) -> Any:
        """Start to sum each rank's part of `whole`, of the number of elements in `counts`, there, in `out`."""
        return reduce_scatter(
            self.shard.comm,
            whole,
            self.guard.op,
            counts=counts,
            out=out,
            algorithm=self.algorithm,
            async_op=True,
            equal=equal,
        )

    def destination(self) -> xp.Array:
        """Return the array for a sum: the shard's gradient, unless something is there already."""
        return self.shard.destination()

    def finish_reduce(self, root: Any, piece: xp.Array) -> None:
        """Take the sum that a reduction has brought."""
        self.deliver(piece)

    def deliver(self, piece: xp.Array) -> None:
        """Add a sum to those of earlier micro-batches in the shard; the first one may lie there already."""
        buffer = self.shard.grad_buffer()
        if self.shard.filled:
            buffer[...] += piece
        elif xp.owner(piece) is not xp.owner(buffer):
            buffer[...] = piece
        self.shard.filled = True

    def settle(self) -> None:
        """All gradients of a pass are reduced; the next one begins."""
        self.left = dict.fromkeys(self.trainable)

    def end_pass(self) -> None:
        """A backward pass is over: release what was gathered ahead in vain."""
        self.finish_gather()
        self.release()

    def forget(self) -> None:
        """Undo what a backward pass has left behind that an error ended."""
        self.differentiating = False
        self.flat.release_grad()
        self.settle()
        self.end_pass()


class FSDPState(BackwardObserver):
    """A sharded module's units (none or one, with some options more), and its hooks, which attach it to the module.

    The state of the outermost module, `root`, also knows what all states share: the order in which modules ran, the
    running pass, and the reduction in flight.
    """

    def __init__(self, module: Module, comm: Comm, units: Sequence[FSDPUnit], guard: Any, prefetch: int) -> None:
        self.guard, self.module, self.comm, self.units, self.prefetch = guard, module, comm, units, prefetch
        self.expected: list[FSDPState] = []  # in which order the modules' forwards began in the forward pass before
        self.began: list[FSDPState] = []  # in which they began in this one
        self.ended: list[FSDPState] = []  # in which they ended; backward reaches the modules in the reverse order
        self.running: BackwardPass | None = None  # the backward pass; a forward inside it is a replayed one
        self.reducing: tuple[FSDPUnit, Work] | None = None  # the reduction in flight, and whose it is
        self.node_done = comm.world.progress  # type: ignore[method-assign]  # advances messages in flight
        guard.covers(module, module.parameters())

        # The outermost module's state is the root of all. Modules are sharded bottom up, so the last one is outermost.
        self.root = self
        vars(module)["fsdp_state"] = self
        for state in states_of(module):
            state.root = self
        for unit in units:
            for parameter in unit.trainable:
                parameter.register_post_accumulate_grad_hook(partial(self._weight_ready, unit))
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post_forward)

    def _pre_forward(self, module: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """[1] Gather this module, start to gather the next ones, and mark the inputs for backward."""
        root = self.root
        if root.running is not None and root.running.over:
            root._forget_pass()
        self._advance_clock()

        # The order of forwards predicts the next pass. A forward that backward replays (recomputation) does not count.
        if root.running is None:
            if self is root:
                root.guard.forward_begins(module)
                root.expected, root.began, root.ended = root.began, [], []
            root.began.append(self)

        # Wait for this module's parameters, then let the next ones travel while it computes.
        self._gather()
        if root.running is None:
            self._prefetch(root.expected)

        return self.inputs(args, kwargs)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the module, marked for [4]."""
        if is_grad_enabled():
            args = backward_hooks(args, self._post_backward, f"input of {self.module.name or 'model'}")
        return args, kwargs

    def _post_forward(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        """[2] Mark the outputs for backward and release this module."""
        root = self.root
        self._advance_clock()
        if is_grad_enabled():
            output = backward_hooks(output, self._pre_backward, f"output of {module.name or 'model'}")

        # A replayed forward is followed by its backward, which needs the module at once: it stays whole.
        if root.running is None:
            for unit in self.units:
                unit.after_forward(is_grad_enabled())
            root.ended.append(self)
        return output

    def _pre_backward(self, running: BackwardPass) -> None:
        """[3] Backward has reached the module's output: its parameters are needed, and soon those of the one before."""
        root = self.root
        if root.running is None:
            root.guard.backward_begins(running)
        root.running = running
        self._advance_clock()

        # The root hears of every node and of the pass's end: `node_done`, `finished`.
        running.attach(root)

        self._gather()
        self._prefetch(root.ended[::-1])
        for unit in self.units:
            unit.differentiating = True

    def _post_backward(self, running: BackwardPass) -> None:
        """[4] Backward has reached the module's input: everything inside it is done."""
        self._advance_clock()
        for unit in self.units:
            unit.after_backward(self.root)

    def finished(self) -> None:
        """[5] The pass is over: modules whose input is not marked (it was tokens) are done too. Nothing stays whole."""
        self._advance_clock()
        units = units_of(self.module)
        for unit in units:
            unit.after_backward(self)
        assert self.running is not None
        if self.running.store is None:
            self._end_reductions(units)
        self.running = None
        for unit in units:
            unit.end_pass()
        self.guard.backward_ended()

    def _weight_ready(self, unit: FSDPUnit, parameter: Parameter) -> None:
        """[6] Outside of a pass, a deferred weight gradient was computed; the unit's last one starts its reduction."""
        if current_pass() is None:
            del unit.left[parameter]
            if not unit.left:
                unit.reduce_now(self.root, [])

    def weights_done(self) -> None:
        """[6] The deferred weight gradients of a pass have been computed, unit by unit: finish what is in flight."""
        self._advance_clock()
        self._end_reductions(units_of(self.module))

    def _end_reductions(self, units: Sequence[FSDPUnit]) -> None:
        """Refuse units that the pass left out, or reduce them as zeros (`OptionalUnit`); finish what is in flight."""
        for unit in units:
            if unit.left:
                unit.reduce_now(self, list(unit.left))
        self.finish_reduction()
        for unit in units:
            unit.settle()

    def _forget_pass(self) -> None:
        """Clean up after a backward pass that an error ended: nothing stays in flight, and nothing stays whole."""
        self.guard.forget()
        if self.reducing is not None:
            self.reducing[1].wait()
        self.running = self.reducing = None
        for unit in units_of(self.module):
            unit.forget()

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, if there is one."""
        if self.reducing is not None:
            (unit, work), self.reducing = self.reducing, None
            unit.finish_reduce(self, work.wait())

    def _gather(self) -> None:
        # Start all before waiting for any: they travel together.
        for unit in self.units:
            unit.start_gather(self.root)
        for unit in self.units:
            unit.finish_gather()

    def _prefetch(self, order: "Sequence[FSDPState]") -> None:
        """Start to gather the modules that follow this one in `order`."""
        if self in order:
            place = order.index(self) + 1
            for following in order[place : place + self.root.prefetch]:
                for unit in following.units:
                    unit.start_gather(self.root)

    def _advance_clock(self) -> None:
        """Let virtual time pass for what has been computed so far."""
        self.comm.advance_clock("forward" if self.root.running is None else "backward")
