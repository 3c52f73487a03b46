"""A node is one recorded operation: where its inputs came from, and how a gradient of its output becomes theirs.

The graph is nodes that point to older nodes. A node never points to the tensor that it produced, so there are no
cycles, and a graph that is not needed any more is freed at once by reference counting.

Of an array that others can change between forward and backward, a parameter's or an input's, a node keeps a
`SavedTensor`. A version counts the updates of a parameter. A write into the array itself (`p.data[...] *= 3`, the next
batch in a reused buffer) counts nothing: NumPy does not say that an array was written to, and comparing all values
would read every weight twice more in each step. So about a hundred values, spread over rows and columns, are kept and
compared: what an optimizer, a clipping, a re-initialisation or another batch writes changes some of them. It costs
about a microsecond. A write to a few elements may be missed; `detect_in_place_changes()` compares all, for debugging.

Proved by: tests/autograd/test_backward.py, tests/autograd/test_in_place.py
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from math import gcd, prod
from typing import Any

from minidist.autograd.errors import VersionError
from minidist.autograd.modes import grad_enabled
from minidist.base import arrays as xp
from minidist.base.half import add_into

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
            if gradient.itemsize == 2:
                add_into(self.grad, gradient)
            else:
                self.grad += gradient
        elif fresh:
            if gradient.itemsize == 2:
                add_into(gradient, self.grad)
            else:
                gradient += self.grad
            self.grad, self.owned = gradient, True
        else:
            self.grad, self.owned = self.grad + gradient, True


# --- what a node keeps of a parameter or an input ---

ELEMENTS = 61  # that are compared, at least, of an array that has as many

_whole: ContextVar[bool] = ContextVar("minidist_compare_whole_arrays", default=False)


@contextmanager
def detect_in_place_changes() -> Iterator[None]:
    """Compare all values, not a sample, of what forwards in the block keep for backward: finds every write to them."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


@cache
def distance(shape: tuple[int, ...]) -> int:
    """Return that of two sampled values: without a common divisor with the row length, so that columns differ."""
    step = max(1, prod(shape) // ELEMENTS)
    while step > 1 and gcd(step, shape[-1]) != 1:
        step -= 1
    return step


class SavedTensor:
    """One use of a parameter or an input by a node: reads the array bound at the time of the backward, if it fits."""

    __slots__ = ("step", "tensor", "values", "version")

    def __init__(self, tensor: Any, version: int, array: xp.Array | None) -> None:
        self.tensor, self.version, self.step, self.values = tensor, version, 0, b""
        # Of an array on a device nothing is compared: the copy would wait for it. Without a graph nothing is read.
        if type(array) is xp.ndarray and grad_enabled.get():
            self.step = 1 if _whole.get() else distance(array.shape)
            self.values = array.ravel()[:: self.step].tobytes()

    @property
    def data(self) -> xp.Array:
        """The array; an error when its values are not those that forward saw."""
        tensor = self.tensor
        if tensor.version != self.version:
            raise VersionError(
                f"parameter {tensor.name!r} was changed between forward and backward: it has version {tensor.version},"
                f" and forward used version {self.version}; call backward before optimizer.step() and before any other"
                " change of its values"
            )
        data: xp.Array = tensor.data

        # The owner of a stash says which version it binds; the values that it binds under that number are its business.
        compares = self.step and (tensor.flat is None or not tensor.flat.version_is_given)
        if compares and data.ravel()[:: self.step].tobytes() != self.values:
            what = f"parameter {tensor.name!r}" if tensor.name else f"an input of shape {data.shape}"
            raise VersionError(
                f"{what} was written to between forward and backward, so gradients would be wrong; call backward before"
                " its values change, or give forward a copy"
            )
        return data
