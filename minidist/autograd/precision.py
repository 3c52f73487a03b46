"""Which operation computes, and leaves its result, in which precision, when its operands are floats of two bytes.

This table is not a description of the rules, it is the rules: `record` and `pair` look every operation up here.

    products        operands of two bytes, products summed in float32, the result rounded to two bytes. Of a float32 and
    a
                    two-byte operand the first is rounded. (torch.amp: "autocast to float16"; tensor cores do the same)
    inside          float32 inside (statistics, exponentials, sums), the result rounded: what follows is a product,
    which
                    would round it anyway. (Fused kernels of Apex and Megatron-LM; torch.amp keeps float32 until the
                    product)
    float32         the result stays float32: losses, sums, and what leaves float16's range. (torch.amp: "autocast to
    float32")
    widest          element by element: float32 when one operand is, else two bytes, each result rounded once.
    (torch.amp:
                    "promote to the widest input type")

An operation that is not listed keeps the precision of its operands. Gradients have the dtype of what they are gradients
of; a node computes them in float32 and rounds them. Sums over many elements (bias and embedding gradients, broadcast
operands) are sums in float32 that are rounded once.

Sources: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.3 (products accumulate in float32;
reductions and point-wise operations read and write two bytes and compute in float32); PyTorch, "Automatic mixed
precision package", op reference; NVIDIA, "Train with mixed precision", on layers and losses.
"""

from typing import Any

from minidist.base import arrays as xp
from minidist.base.half import downcast, is_half

RULES: dict[str, tuple[str, ...]] = {
    "products": ("linear", "matmul", "causal_attention", "causal_attention_heads", "embedding"),
    "inside": ("softmax", "layer_norm", "rms_norm", "gelu", "swiglu", "tanh", "sigmoid", "rotary", "sqrt", "dropout"),
    "float32": ("cross_entropy", "vocab_parallel_cross_entropy", "sum", "log_softmax", "exp", "log", "pow"),
    "widest": ("add", "sub", "mul", "div", "maximum", "where", "concatenate", "stack"),
}
_RULE = {name: rule for rule, names in RULES.items() for name in names}


def result_dtype(name: str, storage: Any) -> Any:
    """The dtype in which operation `name` leaves its result, when its operands are stored as `storage`."""
    return xp.dtype(xp.float32) if is_half(storage) and _RULE.get(name) == "float32" else storage


def stored(name: str, value: xp.Array, storage: Any) -> xp.Array:
    """A result as the rule of operation `name` stores it."""
    return value if storage.itemsize != 2 else downcast(value, result_dtype(name, storage))


def common_dtype(name: str, first: Any, second: Any) -> Any | None:
    """What two operands of different dtypes become: None when nothing is said about them (an error, then)."""
    if {is_half(first), is_half(second)} != {True, False} or xp.float32 not in (first, second):
        return None
    half = first if is_half(first) else second
    return half if _RULE.get(name) == "products" else xp.dtype(xp.float32)
