"""A tensor is an array and, when it needs a gradient, the node that computed it. `record` is the one way to make nodes.

An operation computes its result with array functions, then calls `record` with one edge (input, vjp) for each input;
the tape is the set of nodes that this leaves behind. operators.py and ops/ have the operations.

    y = a * b      y.node: "mul" ──▶ a.node, with the vjp  g -> g b
                                 ──▶ b.node, with the vjp  g -> g a

The graph is nodes that point to older nodes. A node never points to the tensor that it produced, so there are no
cycles, and a graph that is not needed any more is freed at once by reference counting.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_backward.py,
tests/autograd/test_deferred_and_recorded.py
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, cast

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import AutogradError
from minidist.core.base.trace import watchers

# --- a rank's state: whether operations are recorded, and who receives weight gradients ---

grad_enabled: ContextVar[bool] = ContextVar("minidist_grad_enabled", default=True)
is_grad_enabled = grad_enabled.get


@contextmanager
def set_grad_enabled(enabled: bool) -> Iterator[None]:
    """Record operations in the block, or do not."""
    token = grad_enabled.set(enabled)
    try:
        yield
    finally:
        grad_enabled.reset(token)


def no_grad() -> AbstractContextManager[None]:
    """Operations in the block are not recorded: their results need no gradient and keep nothing alive."""
    return set_grad_enabled(False)


# When set, what a node keeps of an operation's arrays: keeper(array) returns an object with `.data` and `.stored`.
# Parameters, inputs and small statistics are kept as they are. (PyTorch's `saved_tensors_hooks` has two functions.)
saved_tensors: ContextVar[Callable[[Any], Any] | None] = ContextVar("minidist_saved_tensors", default=None)

# When set, weight gradients go to this function, (parameter, array) once per use site, and not into the gradients.
contribution_recorder: ContextVar[Any] = ContextVar("minidist_contribution_recorder", default=None)


# A vector-Jacobian product: the gradient of the output (or what `prepare` made of it) to the gradient of one input.
# None stands for the identity.
VectorJacobianProduct = Callable[..., Any]
Prepare = Callable[[Any], Any]  # of the gradient of the output: what every vjp gets, see `Node`
Inputs = tuple[tuple["Node", VectorJacobianProduct | None], ...]
Weights = tuple[tuple[Any, VectorJacobianProduct], ...]

# Only the order of these numbers ever matters, and only between nodes of one graph, so one counter serves all ranks.
_creation_index = itertools.count().__next__


class Node:
    """One operation, or a leaf (no inputs, no weights: the gradient stays in `grad`).

    index: of its creation; backward visits nodes in falling order of it, the reverse order of execution.
    inputs: pairs (node, vjp). None once backward has passed: freed. weights: pairs (parameter, vjp), see `record`.
    prepare: applied once to the gradient of the output; every vjp gets its result.
    grad: sum of the gradients that have arrived so far; `owned` says that nothing else holds that array.
    costs: for watchers, (flops, bytes) of the vjp of each input, and then of each weight.
    replays: parameters to which a replay inside this node will contribute (recomputation).
    over: of a loss that is a mean, over what: "22 rows". `hooks.named_mean` sets it; the core does not read it.
    """

    __slots__ = ("costs", "grad", "index", "inputs", "name", "over", "owned", "prepare", "replays", "weights")

    def __init__(self, name: str, inputs: "Inputs" = (), weights: Weights = (), prepare: Prepare | None = None) -> None:
        self.index = _creation_index()
        self.name = name
        self.inputs: Inputs | None = inputs
        self.weights = weights
        self.prepare = prepare
        self.grad: Any = None
        self.owned = False
        self.costs: list[tuple[int, int]] | None = None
        self.replays: tuple[Any, ...] = ()
        self.over = ""

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


_method = cast("Callable[..., Tensor]", None)  # the type of an operator or a method
_not_here = cast("Callable[..., Tensor]", hooks.not_in_the_core)


class Tensor:
    """An array with a gradient. Not mutable through this class; operations return new tensors.

    data: a NumPy or CuPy array (anything else is converted). requires_grad=True makes a leaf, whose `grad` a backward
    pass fills (and adds to, when it is filled already).
    """

    __slots__ = ("data", "node")
    __array_ufunc__ = None  # makes `numpy_scalar * tensor` come to our __rmul__
    __hash__ = object.__hash__

    data: xp.Array
    node: Any  # Node | None; a Parameter is its own leaf
    half: ClassVar[bool] = False  # is it a HalfOperand of precision.py?
    version: Any = 0  # of the values; a Parameter's counts its updates
    flat: Any = None  # the owner of a Parameter's storage
    name: Any = ""

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        if type(data) is not xp.ndarray:
            is_number = isinstance(data, (float, xp.float32))  # such as a loss
            data = xp.as_array(data) if is_number else (hooks.numbers_of or xp.as_array)(data)
        self.data = data
        if requires_grad and self.data.dtype.kind in "biu":
            hooks.operation_checks().refuse_integers(self)
        self.node = Node("leaf") if requires_grad else None

    @property
    def requires_grad(self) -> bool:
        """True when a backward pass would compute a gradient for this tensor."""
        return self.node is not None

    @property
    def grad(self) -> xp.Array | None:
        """Gradient of a leaf as an array of the tensor's shape; None before backward and for results of operations."""
        return None if self.node is None else self.node.grad

    @grad.setter
    def grad(self, value: xp.Array | None) -> None:
        if self.node is None:
            raise AutogradError("cannot set the gradient of a tensor with requires_grad=False")
        self.node.grad, self.node.owned = value, False

    # Read for every operation; `attrgetter` makes no Python call.
    shape = cast("tuple[int, ...]", property(attrgetter("data.shape"), doc="Length of each dim."))
    dtype = cast("Any", property(attrgetter("data.dtype"), doc="The array's dtype."))
    ndim = cast("int", property(attrgetter("data.ndim"), doc="Number of dims."))
    size = cast("int", property(attrgetter("data.size"), doc="Number of elements."))

    def item(self) -> float:
        """The value of a tensor of one element, as a Python number."""
        return self.data.item()

    def saved(self) -> Any:
        """What a node keeps to read `.data` in backward: the tensor itself, or an object with its `data`."""
        node = self.node
        if (node is not None and node.name != "leaf") or self.data.ndim == 0 or not grad_enabled.get():
            return self if saved_tensors.get() is None else kept(self.data, self)
        return hooks.saved_tensor(self, 0, self.data) or self

    def save(self, array: xp.Array) -> Any:
        """An array of an operation on this tensor, to read `.data` of in backward."""
        return kept(array)

    @property
    def stored(self) -> xp.Array:
        """The array; of a `HalfOperand`, which computes in float32, the 16-bit one."""
        return self.data

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        node = "" if self.node is None else f", node={self.node.name!r}"
        return f"Tensor({self.data!r}{node})"

    if TYPE_CHECKING:  # operators.py sets these, because the operations need Tensor
        __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = __getitem__ = _method
        sum = mean = reshape = _method
        backward: ClassVar[Callable[..., Any]]

    # No model of the core uses these methods: minidist/additions.py adds them.
    __neg__ = __sub__ = __rsub__ = __rtruediv__ = __pow__ = __bool__ = __iter__ = _not_here
    __array__ = __array_function__ = _not_here
    __reduce_ex__: Any = _not_here
    exp = log = max = relu = sqrt = tanh = transpose = detach = astype = _not_here
    T = property(lambda x: x.transpose(), doc="The dims reversed.")


def kept(array: xp.Array, tensor: Tensor | None = None) -> Any:
    """An object to read `.data` of in backward: `tensor`, or one of `array`; or what `saved_tensors` makes of it."""
    keeper = saved_tensors.get()
    if keeper is not None and array.ndim and grad_enabled.get():
        return keeper(array)
    return Tensor(array) if tensor is None else tensor


Edge = tuple[Tensor, Callable[..., Any] | None]


def record(
    name: str,
    data: xp.Array,
    edges: Sequence[Edge],
    weights: Sequence[Edge] = (),
    *,
    prepare: Prepare | None = None,
    cost: Any = None,
    saved: Sequence[xp.Array] = (),
) -> Tensor:
    """The tensor of an operation's result; with a node when an input needs a gradient and recording is on.

    edges: one (input, vjp) for each differentiable input; vjp(grad) returns the input's gradient, in the input's shape
    and dtype, a new array or a view of `grad`, never an array that something else still holds. None is the identity.
    weights: edges whose vjp takes (grad, out=None) and writes to `out` when given, a gradient's buffer.
    prepare: see `Node`.
    cost, saved: for watchers. FLOPs of the forward, which each vjp costs too; or a function that returns them and a
    list of the (flops, bytes) of each vjp, edges first; None: what `FlopCounter` says, usually one per element. Arrays
    that the vjps keep besides inputs and result.
    """
    first = edges or weights
    try:
        in_half = first and first[0][0].half
    except AttributeError:
        hooks.wrong_arguments().refuse_operand(first[0][0])
        raise
    if in_half:
        data, edges, weights, prepare = hooks.precision().in_half(name, data, edges, weights, prepare)

    # The node points to the nodes of the inputs, and to parameters, which are their own leaves.
    out = Tensor(data)
    if grad_enabled.get():
        inputs: tuple[Any, ...] = ()
        parameters: tuple[Any, ...] = ()
        for group in (edges, weights):
            for source, vjp in group:
                node = source.node
                if node.__class__ is Node:
                    inputs += ((node, vjp),)
                elif node is not None:
                    parameters += ((node, vjp if group is weights else into_buffer(vjp)),)
        if inputs or parameters:
            out.node = Node(name, inputs, parameters, prepare)

    for watcher in watchers.get():
        watcher.recorded(name, out, [source for source, _ in (*edges, *weights)], cost, saved)
    return out


def into_buffer(vjp: Callable[..., Any] | None) -> Callable[..., Any]:
    """An ordinary vjp as one that can write to `out`."""

    def write(grad: xp.Array, out: xp.Array | None = None) -> xp.Array:
        value = grad if vjp is None else vjp(grad)
        if out is None:
            return xp.array(value) if value is grad else value
        xp.copyto(out, value)
        return out

    return write
