"""Reverse-mode automatic differentiation: tensors, operations, the backward pass, and the hooks that strategies use.

tensor.py          a tensor, a node, and `record`, the one way to make nodes
parameter.py       a leaf that outlives the graph
backward.py        the backward pass
modes.py           whether operations are recorded
in_place.py        writes into the arrays that a node keeps
precision.py       autocast, and operands in half precision
operands.py        what every operation does with its operands first
operators.py       the operators and methods of a tensor
function.py        operations of one's own
ops/               the operations, one file each, with their gradients
finite_differences.py    gradients compared with finite differences
errors.py          errors of operations and of backward passes
"""

from typing import TYPE_CHECKING

from minidist.autograd.backward import (
    BackwardPass,
    WeightGradStore,
    backward,
    backward_hook,
    backward_hooks,
    current_pass,
    is_in_backward,
    map_tensors,
)
from minidist.base.lazy import lazy_imports

from minidist.autograd import operators  # isort: skip  # noqa: F401  sets the methods of Tensor

if TYPE_CHECKING:
    from minidist.autograd.errors import AutogradError, DtypeError, ShapeError, VersionError
    from minidist.autograd.finite_differences import gradcheck
    from minidist.autograd.function import Function
    from minidist.autograd.in_place import detect_in_place_changes
    from minidist.autograd.modes import (
        contribution_recorder,
        enable_grad,
        is_grad_enabled,
        no_grad,
        saved_tensors_hook,
        set_grad_enabled,
    )
    from minidist.autograd.ops.attention import causal_attention, causal_attention_heads, grouped_query_attention
    from minidist.autograd.ops.checkpoint import checkpoint
    from minidist.autograd.ops.composite_attention import causal_attention_composite
    from minidist.autograd.ops.cross_entropy import cross_entropy, mse_loss
    from minidist.autograd.ops.dropout import dropout
    from minidist.autograd.ops.elementwise import (
        absolute,
        add,
        div,
        exp,
        gelu_composite,
        log,
        maximum,
        minimum,
        mul,
        neg,
        pow,
        relu,
        sigmoid,
        sqrt,
        sub,
        tanh,
        where,
    )
    from minidist.autograd.ops.embedding import embedding
    from minidist.autograd.ops.gelu import gelu
    from minidist.autograd.ops.layer_norm import layer_norm, layer_norm_composite
    from minidist.autograd.ops.linear import linear
    from minidist.autograd.ops.matrix import matmul
    from minidist.autograd.ops.reductions import log_softmax, max, mean, softmax, sum
    from minidist.autograd.ops.rms_norm import rms_norm
    from minidist.autograd.ops.rotary import rotary, rotary_angles
    from minidist.autograd.ops.shaping import (
        broadcast_to,
        concatenate,
        getitem,
        reshape,
        split,
        stack,
        swapaxes,
        transpose,
    )
    from minidist.autograd.ops.swiglu import swiglu
    from minidist.autograd.parameter import BackwardObserver, Gradient, Parameter
    from minidist.autograd.precision import HalfOperand
    from minidist.autograd.tensor import MeanOfRows, Node, SavedTensor, Tensor, record
    from minidist.base.flop_counter import FlopCounter, current_flop_counter

__all__ = [
    "AutogradError",
    "WeightGradStore",
    "BackwardObserver",
    "BackwardPass",
    "DtypeError",
    "Function",
    "FlopCounter",
    "Gradient",
    "HalfOperand",
    "MeanOfRows",
    "Node",
    "Parameter",
    "SavedTensor",
    "ShapeError",
    "Tensor",
    "VersionError",
    "absolute",
    "add",
    "backward",
    "backward_hook",
    "backward_hooks",
    "broadcast_to",
    "causal_attention",
    "causal_attention_composite",
    "causal_attention_heads",
    "checkpoint",
    "concatenate",
    "contribution_recorder",
    "cross_entropy",
    "detect_in_place_changes",
    "div",
    "dropout",
    "embedding",
    "enable_grad",
    "exp",
    "gelu",
    "gelu_composite",
    "getitem",
    "gradcheck",
    "grouped_query_attention",
    "is_grad_enabled",
    "is_in_backward",
    "layer_norm",
    "layer_norm_composite",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "maximum",
    "mean",
    "current_flop_counter",
    "current_pass",
    "map_tensors",
    "minimum",
    "mse_loss",
    "mul",
    "neg",
    "no_grad",
    "pow",
    "record",
    "relu",
    "reshape",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "saved_tensors_hook",
    "set_grad_enabled",
    "sigmoid",
    "softmax",
    "split",
    "sqrt",
    "stack",
    "sub",
    "sum",
    "swapaxes",
    "swiglu",
    "tanh",
    "transpose",
    "where",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
