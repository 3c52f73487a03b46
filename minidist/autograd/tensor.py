"""A tensor is an array and, when it needs a gradient, the node that computed it. `record` is the one way to make nodes.

An operation computes its result with array functions, then calls `record` with one edge (input, vjp) for each input;
the tape is the set of nodes that this leaves behind. Everything else in this package is operations.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from minidist.autograd.errors import AutogradError, DtypeError
from minidist.autograd.modes import flop_counter, grad_enabled, in_segment
from minidist.autograd.node import Node
from minidist.autograd.precision import stored
from minidist.base import arrays as xp
from minidist.base.half import downcast, is_half, upcast
from minidist.base.memory import memory_account

Method = ClassVar[Callable[..., "Tensor"]]


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

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data = data if type(data) is xp.ndarray else xp.as_array(data)
        if requires_grad and self.data.dtype.kind in "biu":
            raise DtypeError(
                f"requires_grad=True for a tensor of {self.data.dtype}: only floats have gradients; cast it first"
            )
        self.node = Node("leaf") if requires_grad else None

    @property
    def requires_grad(self) -> bool:
        """True when a backward pass would compute a gradient for this tensor."""
        return self.node is not None

    @property
    def is_leaf(self) -> bool:
        """True when no recorded operation made this tensor."""
        return self.node is None or self.node.name == "leaf"

    @property
    def grad(self) -> xp.Array | None:
        """Gradient of a leaf as an array of the tensor's shape; None before backward and for results of operations."""
        return None if self.node is None else self.node.grad

    @grad.setter
    def grad(self, value: xp.Array | None) -> None:
        if self.node is None:
            raise AutogradError("cannot set the gradient of a tensor with requires_grad=False")
        self.node.grad, self.node.owned = value, False

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dim."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.data.size

    def item(self) -> float:
        """The value of a tensor of one element, as a Python number."""
        return self.data.item()

    def detach(self) -> "Tensor":
        """The same array without the node: gradients stop here."""
        return Tensor(self.data)

    def saved(self) -> Any:
        """What a node keeps to read `.data` in backward: a tensor itself, of a Parameter a version-checked use."""
        return self

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        node = "" if self.node is None else f", node={self.node.name!r}"
        return f"Tensor({self.data!r}{node})"

    # operators.py sets these, because the operations need Tensor.
    __add__: Method
    __radd__: Method
    __sub__: Method
    __rsub__: Method
    __mul__: Method
    __rmul__: Method
    __truediv__: Method
    __rtruediv__: Method
    __pow__: Method
    __neg__: Method
    __matmul__: Method
    __rmatmul__: Method
    __getitem__: Method
    backward: ClassVar[Callable[..., Any]]
    astype: Method
    sum: Method
    mean: Method
    max: Method
    reshape: Method
    transpose: Method
    T: Any
    exp: Method
    log: Method
    sqrt: Method
    tanh: Method
    relu: Method


Edge = tuple[Tensor, Callable[..., Any] | None]


def record(
    name: str,
    data: xp.Array,
    edges: Sequence[Edge],
    weights: Sequence[Edge] = (),
    *,
    prepare: Callable[[Any], Any] | None = None,
    hook: Callable[[Any, Any], Any] | None = None,
    flops: int | None = None,
    costs: Callable[[], Sequence[tuple[int, int]]] | None = None,
    saved: Sequence[xp.Array] = (),
    storage: Any = None,
) -> Tensor:
    """The tensor of an operation's result; with a node when one of the inputs needs a gradient and recording is on.

    edges: one (input, vjp) for each differentiable input; vjp(grad) returns the input's gradient, in the input's shape
    and dtype, a new array or a view of `grad`, never an array that something else still holds. None is the identity.
    weights: edges whose vjp takes (grad, out=None) and writes to `out` when given; meant for inputs that are mostly
    Parameters, so that the gradient lands in its buffer without a copy.
    prepare, hook: see `Node`. flops: of the forward, for the FLOP counter; default one an element. costs: called only while a counter
    is on; (flops, bytes) of each vjp, edges first; default as much as the forward.
    saved: arrays that the vjps keep besides inputs and result, for the memory account.
    storage: the dtype of the operands, from operations that compute in float32 what is stored in two bytes; then the
    result is stored as `precision.RULES` says, the vjps get float32 gradients, and what they return is rounded to their
    input's dtype.
    """
    if storage is not None and storage.itemsize == 2 and is_half(storage):
        data = stored(name, data, storage)
        edges = [(source, _in_float32(vjp, source.dtype)) for source, vjp in edges]
        weights = [(source, _into_buffer(_in_float32(vjp, source.dtype))) for source, vjp in weights]
        prepare = prepare and _prepared(prepare, storage)
    tensor = Tensor(data)
    inputs: tuple = ()
    parameters: tuple = ()
    if grad_enabled.get():
        for source, vjp in edges:
            node = source.node
            if node is None:
                continue
            if node.__class__ is Node:
                inputs += ((node, vjp),)
            else:
                parameters += ((node, _into_buffer(vjp)),)
        for source, vjp in weights:
            node = source.node
            if node is None:
                continue
            if node.__class__ is Node:
                inputs += ((node, vjp),)
            else:
                parameters += ((node, vjp),)
        if inputs or parameters:
            tensor.node = Node(name, inputs, parameters, prepare, hook)
    elif in_segment.get():
        for source, _ in (*edges, *weights):
            if source.node.__class__ is Node:
                raise AutogradError(
                    f"checkpoint: {name} reads a tensor of shape {source.shape} that needs a gradient and is not an"
                    " argument of the function; pass it as an argument, or detach() it"
                )
    account = memory_account.get()
    if account is not None:
        account.track(tensor.data, "activation")
        if tensor.node is not None:
            for array in saved:
                account.track(array, "activation")
    counter = flop_counter.get()
    if counter is not None:
        every = (*edges, *weights)
        cost = (tensor.size if flops is None else flops, tensor.data.nbytes + sum(t.data.nbytes for t, _ in every))
        counter.add("forward", *cost)
        if tensor.node is not None:
            each = [cost] * len(every) if costs is None else costs()
            # In the order of the node: inputs, then parameters. A frozen input costs nothing.
            needed = [(t.node, c) for (t, _), c in zip(every, each, strict=True) if t.node is not None]
            needed.sort(key=lambda pair: pair[0].__class__ is not Node)
            tensor.node.costs = [c for _, c in needed]
    return tensor


def _in_float32(vjp: Callable[..., Any] | None, dtype: Any) -> Callable[..., Any]:
    """A vjp that computes in float32, between gradients of two bytes."""

    def compute(grad: Any) -> xp.Array:
        grad = grad if type(grad) is tuple else upcast(grad)
        return downcast(grad if vjp is None else vjp(grad), dtype)

    return compute


def _prepared(prepare: Callable[[Any], Any], storage: Any) -> Callable[[Any], Any]:
    """The same for `prepare`, whose result may wait for the weight gradients: an array waits in two bytes."""

    def compute(grad: xp.Array) -> Any:
        result = prepare(upcast(grad))
        return result if type(result) is tuple else downcast(result, storage)

    return compute


def _into_buffer(vjp: Callable[..., Any] | None) -> Callable[..., Any]:
    """An ordinary vjp as one that can write to `out`."""

    def write(grad: xp.Array, out: xp.Array | None = None) -> xp.Array:
        value = grad if vjp is None else vjp(grad)
        if out is None:
            return xp.array(value) if value is grad else value
        xp.copyto(out, value)
        return out

    return write
