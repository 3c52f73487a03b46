"""The backward pass: visit the nodes that a loss depends on, the newest first, and pass each gradient to older nodes.

    loss ── node 9 ── node 8 ── ... ── node 0         forward recorded them in the order 0, 1, ..., 9
            [1] collect the nodes that the loss depends on; count the uses (sites) of each parameter in them
            [2] visit the newest: first the work that its vector-Jacobian products share, then one product
                for each input and each weight
            [3] a parameter whose last site was visited is ready; observers are told

Nodes drop what they saved as they are visited, so memory falls during the pass. Input gradients and weight gradients
are separate work: with `weight_gradients="deferred"` the pass computes the first and returns the second to be run
later (the W of zero-bubble pipelines: Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

Proved by: tests/autograd/test_backward.py, tests/autograd/test_deferred_and_recorded.py
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any

from minidist.core.autograd.parameter import BackwardObserver, Parameter
from minidist.core.autograd.tensor import Node, Tensor, contribution_recorder, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import AutogradError, ShapeError
from minidist.core.base.trace import watchers

_creation = attrgetter("index")

_running: ContextVar[Any] = ContextVar("minidist_running_backward_pass", default=None)
current_pass = _running.get  # the pass that is running on this rank, or None


def backward(
    tensor: Tensor, gradient: Any = None, *, observers: Sequence[BackwardObserver] = (), weight_gradients: str = "now"
) -> "WeightGradStore | None":
    """Compute the gradients of `tensor` for every leaf and parameter that it depends on, and add them there.

    gradient: d(something)/d(tensor), an array or tensor of the tensor's shape; it may be left out for one element.
    observers: they are told how the pass goes on, as those are that are registered on parameters (`BackwardObserver`).
    weight_gradients: "now", or "deferred": then parameters get nothing yet, and a `WeightGradStore` is returned.

    The graph is used up: a second backward through any node of it raises AutogradError.
    """
    root = tensor.node
    if root is None or weight_gradients not in ("now", "deferred") or (gradient is None and tensor.size != 1):
        hooks.operation_checks().refuse_backward(tensor, weight_gradients)

    # The gradient of the tensor itself: ones for a loss, checked and in the tensor's dtype otherwise.
    data = tensor.data
    if gradient is None:
        gradient = xp.ones_like(data)
    else:
        gradient = xp.as_array(gradient.data if isinstance(gradient, Tensor) else gradient, data.dtype)
        if gradient.shape != data.shape:
            raise ShapeError(f"backward: gradient of shape {gradient.shape} for a tensor of shape {data.shape}")

    # Observers join before the first node is visited, and are told at the end that all nodes were.
    running = BackwardPass(observers, weight_gradients)
    if root.__class__ is not Node:  # backward from a parameter itself
        root.accumulate(gradient)
        return running.store
    token = _running.set(running)
    try:
        tape = running.collect(root)
        for check in hooks.backward_checks:
            check(running, root, gradient)
        running.visit(root, gradient, tape)
        for observer in running.observers:
            observer.finished()
    finally:
        running.over = True
        _running.reset(token)
    return running.store


Tensor.backward = backward


class BackwardPass:
    """One pass over one graph. A recomputed block (a replay) has a separate graph, visited in the same pass."""

    def __init__(self, observers: Sequence[BackwardObserver] = (), weight_gradients: str = "now") -> None:
        self.store = WeightGradStore(self) if weight_gradients == "deferred" else None
        self.sites: dict[Parameter, int] = {}  # contributions still to come, by parameter
        self.observers: list[BackwardObserver] = []  # in the order in which they joined
        self.over = False  # also when an error has ended it
        self.watchers = watchers.get()
        self._told_all = observers
        for observer in observers:
            self.attach(observer)

    def attach(self, observer: BackwardObserver) -> None:
        """Let `observer` join the pass, if it has not yet."""
        if observer not in self.observers:
            self.observers.append(observer)
            observer.started()

    def collect(self, root: Node) -> list[Node]:
        """[1] Return the nodes that `root` depends on, oldest first; count each parameter's use sites on the way."""
        sites = self.sites
        seen = {root}
        todo = [root]
        tape = []
        while todo:
            node = todo.pop()
            if node.inputs is None:
                hooks.operation_checks().refuse_freed(node)
            tape.append(node)
            for source, _ in node.inputs:  # type: ignore[union-attr]
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
            for parameter, _ in node.weights:
                sites[parameter] = sites.get(parameter, 0) + 1
            for parameter in node.replays:
                sites[parameter] = sites.get(parameter, 0) + 1
        tape.sort(key=_creation)
        return tape

    def visit(self, root: Node, gradient: xp.Array, tape: list[Node]) -> None:
        """[2] Visit the nodes of a tape, the newest first; gradient: of the output of `root`."""
        if root.grad is None:
            root.grad, root.owned = gradient, False
        else:  # a leaf that has one already
            root.receive(gradient, fresh=False)
        while tape:
            self._visit(tape.pop())
            for observer in self.observers:
                observer.node_done()

    def _visit(self, node: Node) -> None:
        """Pass the gradient of the node's output to its inputs and weights, and free what the node saved."""
        if node.name == "leaf":  # the gradient stays, as an array that belongs to the leaf alone
            node.grad = xp.as_array(node.grad) if node.owned else xp.array(node.grad)
            node.owned = True
            return
        inputs, weights, prepare, gradient = node.inputs, node.weights, node.prepare, node.grad
        node.inputs, node.weights, node.prepare, node.grad = None, (), None, None

        # The work that all products share.
        if prepare is not None:
            gradient = prepare(gradient)

        # Gradients of the inputs, which older nodes wait for.
        told = self.watchers
        costs = iter((node.costs if told else None) or ())
        for source, vjp in inputs:  # type: ignore[union-attr]
            result = gradient if vjp is None else vjp(gradient)
            if told:
                cost = next(costs, None)
                for watcher in told:
                    watcher.input_gradient(result, cost)
            # A new array that is not a view is the source's own; what may be shared is never added to in place.
            fresh = result is not gradient and result.base is None
            if source.grad is None:
                source.grad, source.owned = result, fresh
            else:
                source.receive(result, fresh)

        # Gradients of the weights, now or later.
        take = self.site_done if self.store is None else self.store.put
        for parameter, vjp in weights:
            take(parameter, partial(vjp, gradient), next(costs, None))

    def site_done(
        self, parameter: Parameter, compute: Callable[..., Any] | None = None, cost: tuple[int, int] | None = None
    ) -> None:
        """[3] Add one contribution, if there is one, and wait for one less; the last makes the parameter ready."""
        if compute is not None:
            parameter.accumulate(compute)
            for watcher in self.watchers:
                watcher.weight_gradient(cost)
        self.sites[parameter] -= 1
        if self.sites[parameter] == 0:
            if parameter.gradient.local is None and contribution_recorder.get() is None:
                parameter.zero_fill()  # a replay read it and did not differentiate it
            for hook in parameter.ready_hooks:
                hook(parameter)
            for observer in (*parameter.observers, *self._told_all):
                self.attach(observer)
                observer.parameter_ready(parameter)


class WeightGradStore:
    """Weight gradients that a backward pass left to be computed, in the order of the pass; as in Megatron-LM."""

    def __init__(self, owner: BackwardPass) -> None:
        self._owner, self._ran = owner, False
        self.work: list[tuple[Parameter, Callable[..., Any], tuple[int, int] | None]] = []

    def put(self, parameter: Parameter, compute: Callable[..., Any], cost: tuple[int, int] | None) -> None:
        """Append one weight gradient: compute(out) returns it."""
        self.work.append((parameter, compute, cost))

    def run(self) -> None:
        """Compute them all, once; a second run is an error, because every weight would be counted twice."""
        if self._ran:
            raise AutogradError("deferred weight gradients ran already; each backward pass leaves them once")
        self._ran = True
        self._owner.watchers = watchers.get()  # those of the time at which the work is done
        self.work.reverse()
        while self.work:
            self._owner.site_done(*self.work.pop())
        for observer in self._owner.observers:
            observer.weights_done()


# --- hooks on tensors: a strategy learns how far the backward pass has come ---
#
# A hook is an identity node on the tape. Backward reaches it when the gradient of the tensor is complete, which is
# after everything recorded later and before everything recorded earlier:
#
#     x ── backward_hook ── layer ── backward_hook ── y        forward ──▶
#          [2] the layer's        [1] the layer's
#          backward is done       backward begins               ◀── backward


def backward_hook(x: Tensor, hook: Callable[[BackwardPass], None], name: str = "backward hook") -> Tensor:
    """Return x as a tensor behind a node that calls hook(the pass) when backward reaches it.

    It does not where x needs no gradient, as the input of the first layer.
    """
    return record(name, x.data, ((x, None),), prepare=partial(call_hook, hook), cost=0)


def call_hook(hook: Callable[[BackwardPass], None], gradient: xp.Array) -> xp.Array:
    """Call hook(the pass that is running), and return the gradient as it is."""
    hook(current_pass())
    return gradient


def backward_hooks(value: Any, hook: Callable[[BackwardPass], None], name: str = "backward hook") -> Any:
    """Return `value` with a `backward_hook` on every tensor in it that needs a gradient, see `map_tensors`."""
    return map_tensors(value, lambda x: x if x.node is None else backward_hook(x, hook, name))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with function(tensor) in the place of every tensor in it.

    It looks into tuples, named tuples, lists and dicts, and into the attributes of other objects (dataclasses, classes
    of the user), in whose place it returns shallow copies. Everything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, function) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    return hooks.map_object(value, function)
