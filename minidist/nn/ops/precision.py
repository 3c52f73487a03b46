"""Autocast: in which precision an operation computes, and leaves its result, when its operands are 16-bit floats.

This table is not a description of the rules, it is the rules: `in_half` and `operands` look every operation up here.
The names are those of torch.amp.

    to half        products: the operands are half precision, products are summed in float32, the result is rounded to
                   half. Of a float32 and a half operand the first is rounded. (Tensor cores do the same.)
    to float32     the result stays float32: losses, sums, and what leaves float16's range
    promote        the result has the widest type among the operands. Statistics, exponentials and gates compute in
                   float32 inside and round once, as the fused kernels of Apex and Megatron-LM do (torch.amp keeps
                   their result in float32 until the next product, which would round it anyway)

An operation that is not listed keeps the precision of its operands. Gradients have the dtype of what they are gradients
of; a node computes them in float32 and rounds them. Sums over many elements (bias and embedding gradients, broadcast
operands) are sums in float32 that are rounded once.

                 operand(x)                                          record(name, ...)
    half x  ──▶  reads as float32, saves as half  ──▶  operation ──▶ rounds result and gradients to half

Sources: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.3 (products accumulate in float32;
reductions and point-wise operations read and write half precision and compute in float32); PyTorch, "Automatic mixed
precision package", op reference; NVIDIA, "Train with mixed precision", on layers and losses.
Proved by: tests/autograd/test_half.py
"""

from collections.abc import Callable, Sequence
from typing import Any

from minidist.core.autograd.tensor import Edge, Tensor, into_buffer, kept
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import downcast, is_half, upcast
from minidist.core.base.errors import DtypeError

RULES: dict[str, tuple[str, ...]] = {
    "to half": ("linear", "matmul", "causal_attention", "causal_attention_heads", "embedding"),
    "to float32": (
        *("cross_entropy", "vocab_parallel_cross_entropy", "distillation_loss", "vocab_parallel_distillation_loss"),
        *("sum", "log_softmax", "exp", "log", "pow"),
    ),
    "promote": (
        *("add", "sub", "mul", "div", "maximum", "where", "concatenate", "stack"),
        *("softmax", "layer_norm", "rms_norm", "gelu", "swiglu", "tanh", "sigmoid", "rotary", "sqrt", "dropout"),
    ),
}
_RULE = {name: rule for rule, names in RULES.items() for name in names}


def result_dtype(name: str, storage: Any) -> Any:
    """The dtype in which operation `name` leaves its result, when its operands are stored as `storage`."""
    return xp.dtype(xp.float32) if is_half(storage) and _RULE.get(name) == "to float32" else storage


def common_dtype(name: str, first: Any, second: Any) -> Any | None:
    """What two operands of different dtypes become: None when nothing is said about them (an error, then)."""
    if {is_half(first), is_half(second)} != {True, False} or xp.float32 not in (first, second):
        return None
    half = first if is_half(first) else second
    return half if _RULE.get(name) == "to half" else xp.dtype(xp.float32)


def of_one_dtype(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two operands of different dtypes in the one that they become; DtypeError where nothing is said about them."""
    dtype = common_dtype(name, a.dtype, b.dtype)
    if dtype is None:
        raise DtypeError(
            f"{name}: dtypes {a.dtype} and {b.dtype} differ (shapes {a.shape} and {b.shape}); cast one operand first"
        )
    return a.astype(dtype), b.astype(dtype)


def half_vjp(vjp: Callable[..., Any] | None, dtype: Any) -> Callable[[Any], Any]:
    """A vjp that computes in float32, between gradients of half precision; `dtype` is that of the source."""

    def compute(grad: Any) -> xp.Array:
        grad = grad if type(grad) is tuple else upcast(grad)
        return downcast(grad if vjp is None else vjp(grad), dtype)

    return compute


def half_prepare(prepare: Callable[[Any], Any], storage: Any) -> Callable[[Any], Any]:
    """A `prepare` that computes in float32. Its result may wait for the weight gradients: an array waits in half."""

    def compute(grad: xp.Array) -> Any:
        result = prepare(upcast(grad))
        return result if type(result) is tuple else downcast(result, storage)

    return compute


class HalfOperand(Tensor):
    """A 16-bit tensor as an operation sees it that computes in float32: `data` reads as a new float32 array.

    What a node keeps of it stays 16-bit and is upcast anew at each read. `stored` is the 16-bit array.
    """

    __slots__ = ("source",)
    half = True

    def __init__(self, source: Any) -> None:
        self.source = source  # a tensor, or what it saved

    @property
    def data(self) -> xp.Array:  # type: ignore[override]
        """The values in float32."""
        return upcast(self.source.data)

    @property
    def stored(self) -> xp.Array:
        """The array as it is stored."""
        return self.source.data

    @property
    def node(self) -> Any:
        """The node of the tensor."""
        return self.source.node

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Length of each dim."""
        return self.source.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the stored array."""
        return self.source.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self.source.shape)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of elements."""
        return self.source.size

    def saved(self) -> "HalfOperand":
        """What a node keeps: what the tensor saves, read as float32."""
        return HalfOperand(self.source.saved())

    def save(self, array: xp.Array) -> "HalfOperand":
        """An array of the operation, rounded to the stored dtype, to be read as float32 in backward."""
        return HalfOperand(kept(downcast(array, self.source.dtype)))


def in_half(
    name: str, data: xp.Array, edges: Sequence[Edge], weights: Sequence[Edge], prepare: Callable[[Any], Any] | None
) -> tuple[xp.Array, Sequence[Edge], Sequence[Edge], Callable[[Any], Any] | None]:
    """Return a record of HalfOperands, computed in float32, with its result and its gradients in half precision."""
    storage = (edges or weights)[0][0].dtype
    return (
        downcast(data, result_dtype(name, storage)),
        [(source, half_vjp(vjp, source.dtype)) for source, vjp in edges],
        [(source, into_buffer(half_vjp(vjp, source.dtype))) for source, vjp in weights],
        prepare and half_prepare(prepare, storage),
    )


def loss_gradient(
    logits: Tensor, largest: xp.Array, words: int | None, gradient_from: Callable[[xp.Array], xp.Array]
) -> Callable[[xp.Array], xp.Array]:
    """Return the vjp of `softmax_loss` for logits in half precision, which computes the exponentials once more.

    gradient_from: the gradient of the logits from their exponentials. words: columns that are not padding.
    """
    kept, classes = logits.saved(), logits.shape[-1]

    def grad_again(g: xp.Array) -> xp.Array:
        again = kept.data.reshape(-1, classes)
        again -= largest
        if words is not None:
            again[:, words:] = -xp.inf
        result = gradient_from(xp.exp(again, out=again))
        result *= g
        return result

    return grad_again
