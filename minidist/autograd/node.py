"""A node is one recorded operation: where its inputs came from, and how a gradient of its output becomes theirs.

The graph is nodes that point to older nodes. A node never points to the tensor that it produced, so there are no
cycles, and a graph that is not needed any more is freed at once by reference counting.

Of an array that others can change between forward and backward, a parameter's or an input's, a node keeps a
`SavedTensor`, which knows how often a parameter had been updated.

Proved by: tests/autograd/test_backward.py, tests/autograd/test_in_place.py
"""

import itertools
from collections.abc import Callable
from typing import Any

from minidist.autograd.errors import VersionError
from minidist.base import arrays as xp

# A vector-Jacobian product: the gradient of the output (or what `prepare` made of it) to the gradient of one input.
# None stands for the identity.
VectorJacobianProduct = Callable[..., Any]

# Only the order of these numbers ever matters, and only between nodes of one graph, so one counter serves all ranks.
_creation_index = itertools.count().__next__


class Node:
    """One operation, or a leaf (no inputs, no weights: the gradient stays in `grad`).

    index: creation index; backward visits reachable nodes in falling order of it, which is reverse order of execution.
    name: the operation, for error messages.
    inputs: pairs (node, vjp), the gradients that later (older) nodes wait for. None once backward has passed: freed.
    weights: pairs (parameter, vjp); vjp(grad, out=None) writes the whole contribution to `out` when it is given.
    prepare: applied once to the gradient of the output; every vjp receives its result. Work that the vjps share.
    hook: like `prepare`, of nodes that deal with the pass itself: hook(pass, gradient).
    grad: sum of the gradients that have arrived so far; `owned` says that nothing else holds that array.
    costs: when a counter was on in forward, (flops, bytes) of the vjp of each input, and then of each weight.
    replays: parameters to which a replay inside this node will contribute (recomputation).
    """

    __slots__ = ("costs", "grad", "hook", "index", "inputs", "name", "owned", "prepare", "replays", "weights")

    def __init__(
        self,
        name: str,
        inputs: "tuple[tuple[Node, VectorJacobianProduct | None], ...]" = (),
        weights: tuple[tuple[Any, VectorJacobianProduct], ...] = (),
        prepare: Callable[[Any], Any] | None = None,
        hook: Callable[[Any, Any], Any] | None = None,
        replays: tuple[Any, ...] = (),
    ) -> None:
        self.index = _creation_index()
        self.name = name
        self.inputs: tuple[tuple[Node, VectorJacobianProduct | None], ...] | None = inputs
        self.weights = weights
        self.prepare = prepare
        self.hook = hook
        self.grad: Any = None
        self.owned = False
        self.costs: list[tuple[int, int]] | None = None
        self.replays = replays

    def receive(self, gradient: Any, fresh: bool) -> None:
        """Add one gradient of this node's output. `fresh`: the caller gives the array away and keeps no reference."""
        if self.grad is None:
            self.grad, self.owned = gradient, fresh
        elif self.owned:
            self.grad = xp.add_into(self.grad, gradient)
        elif fresh:
            self.grad, self.owned = xp.add_into(gradient, self.grad), True
        else:
            self.grad, self.owned = self.grad + gradient, True


class SavedTensor:
    """One use of a parameter or an input by a node: reads the array bound at the time of the backward, if it fits.

    in_place.py adds a check that notices writes into the array itself.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Any, version: int) -> None:
        self.tensor, self.version = tensor, version

    def read(self) -> xp.Array:
        """Return the array; an error when it has another version than forward saw."""
        tensor = self.tensor
        if tensor.version != self.version:
            raise VersionError(
                f"parameter {tensor.name!r} was changed between forward and backward: it has version {tensor.version},"
                f" and forward used version {self.version}; call backward before optimizer.step() and before any other"
                " change of its values"
            )
        return tensor.data

    data = property(read)
