"""The backward pass: visit the nodes that a loss depends on, the newest first, and hand each gradient to older nodes.

Nodes are popped as they are visited and drop what they saved, so memory falls during the pass. Input gradients and
weight gradients are separate work: with `weight_gradients="deferred"` the pass computes the first and returns the
second as a list to run later (the W of zero-bubble pipelines: Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from collections.abc import Callable
from contextvars import ContextVar
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from minidist.autograd.errors import AutogradError, ShapeError
from minidist.autograd.modes import FlopCounter, contribution_recorder, flop_counter
from minidist.autograd.node import Node
from minidist.base import arrays as xp
from minidist.base.memory import memory_account

if TYPE_CHECKING:
    from minidist.autograd.parameter import Parameter
    from minidist.autograd.tensor import Tensor

_creation = attrgetter("index")

# Defaults of the arguments of the same name, for callers that do not call `backward` themselves.
on_ready_hook: ContextVar["Callable[[Parameter], None] | None"] = ContextVar("minidist_on_ready", default=None)
after_node_hook: ContextVar[Callable[[], None] | None] = ContextVar("minidist_after_node", default=None)
current_pass: ContextVar["BackwardPass | None"] = ContextVar("minidist_backward_pass", default=None)


def backward(
    tensor: "Tensor",
    gradient: Any = None,
    *,
    on_ready: "Callable[[Parameter], None] | None" = None,
    after_node: Callable[[], None] | None = None,
    weight_gradients: str = "now",
) -> "WeightGradStore | None":
    """Compute the gradients of `tensor` for every leaf and parameter that it depends on, and add them there.

    gradient: d(something)/d(tensor), an array or tensor of the tensor's shape and dtype; it may be left out when the
    tensor has one element. It is not modified.
    on_ready(parameter): called once for each parameter in this graph, right after its last contribution was added.
    after_node(): called after each visited node; the place to let communication progress.
    weight_gradients: "now", or "deferred": then parameters get nothing yet and the answer is a `WeightGradStore`.

    The graph is used up: a second backward through any node of it raises AutogradError.
    """
    if weight_gradients not in ("now", "deferred"):
        raise AutogradError(f"weight_gradients must be 'now' or 'deferred', not {weight_gradients!r}")
    if tensor.node is None:
        raise AutogradError(
            f"backward from a tensor of shape {tensor.shape} that needs no gradient: nothing in it is trained"
        )
    if gradient is None:
        if tensor.size != 1:
            raise AutogradError(
                f"backward from a tensor of shape {tensor.shape} needs gradient=; only one element can do without"
            )
        gradient = xp.ones_like(tensor.data)
    else:
        gradient = xp.as_array(
            getattr(gradient, "data", gradient) if not xp.is_array(gradient) else gradient, tensor.dtype
        )
        if gradient.shape != tensor.shape:
            raise ShapeError(f"backward: gradient of shape {gradient.shape} for a tensor of shape {tensor.shape}")
    return BackwardPass(on_ready or on_ready_hook.get(), after_node or after_node_hook.get(), weight_gradients).run(
        tensor.node, gradient
    )


class BackwardPass:
    """One walk over one graph. Recomputation walks its replayed graph inside the same pass, with `run_nested`."""

    def __init__(
        self,
        on_ready: "Callable[[Parameter], None] | None" = None,
        after_node: Callable[[], None] | None = None,
        weight_gradients: str = "now",
    ) -> None:
        self.on_ready = on_ready
        self.after_node = after_node
        self.deferred = WeightGradStore(self) if weight_gradients == "deferred" else None
        self.sites: dict[Parameter, int] = {}  # contributions still to come, by parameter
        self.counter: FlopCounter | None = flop_counter.get()
        self.account = memory_account.get()
        self._at_end: dict[Any, Callable[[], None]] = {}
        self.notes: dict[Any, Any] = {}  # what markers on the way told the hooks of this pass, each under its own key

    def at_end(self, key: Any, callback: Callable[[], None]) -> None:
        """Call `callback()` once when this pass has visited every node; a second one with the same key is ignored."""
        self._at_end.setdefault(key, callback)

    def run(self, root: Any, gradient: xp.Array) -> "WeightGradStore | None":
        """Walk from the node `root` with the gradient of its output."""
        if root.__class__ is not Node:  # backward from a parameter itself
            root.accumulate(gradient)
            return self.deferred
        token = current_pass.set(self)
        try:
            self._walk(root, gradient)
            for callback in self._at_end.values():
                callback()
        finally:
            current_pass.reset(token)
        return self.deferred

    def run_nested(self, root: Any, gradient: xp.Array, replayed: "tuple[Parameter, ...]") -> None:
        """Walk a graph that a node of this pass has just recomputed, and settle the sites that stood for the replay."""
        tape = self._collect(root) if root is not None else []
        for parameter in replayed:
            self.site_done(parameter)
        if tape:
            self._walk(root, gradient, tape)

    def _walk(self, root: Node, gradient: xp.Array, tape: list[Node] | None = None) -> None:
        tape = self._collect(root) if tape is None else tape
        root.receive(gradient, fresh=False)
        while tape:
            self._visit(tape.pop())
            if self.after_node is not None:  # a reducer may set it during the walk
                self.after_node()

    def _collect(self, root: Node) -> list[Node]:
        """The nodes that `root` depends on, oldest first; counts the use sites of each parameter on the way."""
        sites = self.sites
        seen = {root}
        todo = [root]
        tape = []
        while todo:
            node = todo.pop()
            if node.inputs is None:
                raise AutogradError(
                    f"second backward through {node.name!r}: the first one freed what it saved; run the forward again"
                )
            tape.append(node)
            for source, _ in node.inputs:
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
            for parameter, _ in node.weights:
                sites[parameter] = sites.get(parameter, 0) + 1
            for parameter in node.replays:
                sites[parameter] = sites.get(parameter, 0) + 1
        tape.sort(key=_creation)
        return tape

    def _visit(self, node: Node) -> None:
        inputs, weights = node.inputs, node.weights
        if node.name == "leaf":  # the gradient stays, as an array that belongs to the leaf alone
            node.grad = xp.as_array(node.grad) if node.owned else xp.array(node.grad)
            node.owned = True
            return
        gradient, prepare = node.grad, node.prepare
        node.inputs, node.weights, node.prepare, node.grad = None, (), None, None
        if prepare is not None:
            gradient = prepare(gradient)
        costs = iter(node.costs or ()) if self.counter is not None else None
        for source, vjp in inputs:  # type: ignore[union-attr]
            result = gradient if vjp is None else vjp(gradient)
            if self.account is not None:
                self.account.track(result, "activation_gradient")
            if costs is not None:
                self.counter.add("input_gradient", *next(costs, (0, 0)))  # type: ignore[union-attr]
            # A new array that is no view is the source's own; what may be shared is never added to in place.
            fresh = result is not gradient and result.base is None
            if source.grad is None:
                source.grad = result
                source.owned = fresh
            else:
                source.receive(result, fresh)
        for parameter, vjp in weights:
            cost = None if costs is None else next(costs, None)
            if self.deferred is not None:
                self.deferred.add(parameter, vjp, gradient, cost)
            else:
                self.contribute(parameter, vjp, gradient, cost)

    def contribute(
        self, parameter: "Parameter", vjp: Callable[..., Any], gradient: Any, cost: tuple[int, int] | None
    ) -> None:
        """Compute one weight gradient and add it to its parameter."""
        parameter.accumulate(lambda out: vjp(gradient, out))
        if self.counter is not None and cost is not None:
            self.counter.add("weight_gradient", *cost)
        self.site_done(parameter)

    def site_done(self, parameter: "Parameter") -> None:
        """One contribution less to wait for; the last one makes the parameter ready."""
        self.sites[parameter] -= 1
        if self.sites[parameter] == 0:
            if parameter.gradient.local is None and contribution_recorder.get() is None:
                parameter.zero_fill()  # a replay read it and did not differentiate it
            for hook in parameter.ready_hooks:
                hook(parameter)
            if self.on_ready is not None:
                self.on_ready(parameter)


class WeightGradStore:
    """Weight gradients that a backward pass left to do, in the order of the pass; keeps alive what they need."""

    def __init__(self, owner: BackwardPass) -> None:
        self._owner = owner
        self._work: list[tuple[Parameter, Callable[..., Any], Any, tuple[int, int] | None]] | None = []

    def add(self, parameter: "Parameter", vjp: Callable[..., Any], gradient: Any, cost: tuple[int, int] | None) -> None:
        """Append one weight gradient."""
        assert self._work is not None
        self._work.append((parameter, vjp, gradient, cost))

    def __len__(self) -> int:
        return len(self._work or ())

    def run(self) -> None:
        """Compute them all, once; a second run is an error (every weight would be counted twice)."""
        if self._work is None:
            raise AutogradError("deferred weight gradients ran already; each backward pass leaves them once")
        work, self._work = self._work, None
        self._owner.counter = flop_counter.get()
        work.reverse()
        while work:
            self._owner.contribute(*work.pop())
