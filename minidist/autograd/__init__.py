"""Reverse-mode automatic differentiation: tensors, operations, the backward pass, and the hooks that strategies use.

tensor.py          a tensor, a node, and `record`, the one way to make nodes
parameter.py       a leaf that outlives the graph
backward.py        the backward pass
modes.py           whether operations are recorded
in_place.py        writes into the arrays that a node keeps
objects.py         tensors in objects of a user's class
precision.py       autocast, and operands in half precision
operands.py        what every operation does with its operands first
operators.py       the operators and methods of a tensor
function.py        operations of one's own
ops/               the operations, one file each, with their gradients
finite_differences.py    gradients compared with finite differences
errors.py          errors of operations and of backward passes
"""

from typing import TYPE_CHECKING

from minidist.autograd.backward import BackwardPass as BackwardPass
from minidist.autograd.backward import WeightGradStore as WeightGradStore
from minidist.autograd.backward import backward as backward
from minidist.autograd.backward import backward_hook as backward_hook
from minidist.autograd.backward import backward_hooks as backward_hooks
from minidist.autograd.backward import current_pass as current_pass
from minidist.autograd.backward import is_in_backward as is_in_backward
from minidist.autograd.backward import map_tensors as map_tensors
from minidist.base.lazy import lazy_imports

from minidist.autograd import operators  # isort: skip  # noqa: F401  sets the methods of Tensor

if TYPE_CHECKING:
    from minidist.autograd.errors import AutogradError as AutogradError
    from minidist.autograd.errors import DtypeError as DtypeError
    from minidist.autograd.errors import ShapeError as ShapeError
    from minidist.autograd.errors import VersionError as VersionError
    from minidist.autograd.finite_differences import gradcheck as gradcheck
    from minidist.autograd.function import Function as Function
    from minidist.autograd.in_place import detect_in_place_changes as detect_in_place_changes
    from minidist.autograd.modes import contribution_recorder as contribution_recorder
    from minidist.autograd.modes import enable_grad as enable_grad
    from minidist.autograd.modes import is_grad_enabled as is_grad_enabled
    from minidist.autograd.modes import no_grad as no_grad
    from minidist.autograd.modes import saved_tensors_hook as saved_tensors_hook
    from minidist.autograd.modes import set_grad_enabled as set_grad_enabled
    from minidist.autograd.ops.attention import causal_attention as causal_attention
    from minidist.autograd.ops.attention import causal_attention_heads as causal_attention_heads
    from minidist.autograd.ops.attention import grouped_query_attention as grouped_query_attention
    from minidist.autograd.ops.checkpoint import checkpoint as checkpoint
    from minidist.autograd.ops.comparisons import absolute as absolute
    from minidist.autograd.ops.comparisons import maximum as maximum
    from minidist.autograd.ops.comparisons import minimum as minimum
    from minidist.autograd.ops.comparisons import sigmoid as sigmoid
    from minidist.autograd.ops.comparisons import where as where
    from minidist.autograd.ops.composite import causal_attention_composite as causal_attention_composite
    from minidist.autograd.ops.composite import gelu_composite as gelu_composite
    from minidist.autograd.ops.composite import layer_norm_composite as layer_norm_composite
    from minidist.autograd.ops.cross_entropy import cross_entropy as cross_entropy
    from minidist.autograd.ops.cross_entropy import mse_loss as mse_loss
    from minidist.autograd.ops.dropout import dropout as dropout
    from minidist.autograd.ops.elementwise import add as add
    from minidist.autograd.ops.elementwise import div as div
    from minidist.autograd.ops.elementwise import exp as exp
    from minidist.autograd.ops.elementwise import log as log
    from minidist.autograd.ops.elementwise import mul as mul
    from minidist.autograd.ops.elementwise import neg as neg
    from minidist.autograd.ops.elementwise import pow as pow
    from minidist.autograd.ops.elementwise import relu as relu
    from minidist.autograd.ops.elementwise import sqrt as sqrt
    from minidist.autograd.ops.elementwise import sub as sub
    from minidist.autograd.ops.elementwise import tanh as tanh
    from minidist.autograd.ops.embedding import embedding as embedding
    from minidist.autograd.ops.gelu import gelu as gelu
    from minidist.autograd.ops.layer_norm import layer_norm as layer_norm
    from minidist.autograd.ops.linear import linear as linear
    from minidist.autograd.ops.matrix import matmul as matmul
    from minidist.autograd.ops.reductions import log_softmax as log_softmax
    from minidist.autograd.ops.reductions import max as max
    from minidist.autograd.ops.reductions import mean as mean
    from minidist.autograd.ops.reductions import softmax as softmax
    from minidist.autograd.ops.reductions import sum as sum
    from minidist.autograd.ops.rms_norm import rms_norm as rms_norm
    from minidist.autograd.ops.rotary import rotary as rotary
    from minidist.autograd.ops.rotary import rotary_angles as rotary_angles
    from minidist.autograd.ops.shaping import broadcast_to as broadcast_to
    from minidist.autograd.ops.shaping import concatenate as concatenate
    from minidist.autograd.ops.shaping import getitem as getitem
    from minidist.autograd.ops.shaping import reshape as reshape
    from minidist.autograd.ops.shaping import split as split
    from minidist.autograd.ops.shaping import stack as stack
    from minidist.autograd.ops.shaping import swapaxes as swapaxes
    from minidist.autograd.ops.shaping import transpose as transpose
    from minidist.autograd.ops.swiglu import swiglu as swiglu
    from minidist.autograd.parameter import BackwardObserver as BackwardObserver
    from minidist.autograd.parameter import Gradient as Gradient
    from minidist.autograd.parameter import Parameter as Parameter
    from minidist.autograd.precision import HalfOperand as HalfOperand
    from minidist.autograd.tensor import MeanOfRows as MeanOfRows
    from minidist.autograd.tensor import Node as Node
    from minidist.autograd.tensor import SavedTensor as SavedTensor
    from minidist.autograd.tensor import Tensor as Tensor
    from minidist.autograd.tensor import record as record
    from minidist.base.flop_counter import FlopCounter as FlopCounter
    from minidist.base.flop_counter import current_flop_counter as current_flop_counter

__getattr__, __dir__ = lazy_imports(__name__, __file__)
