"""Reverse-mode automatic differentiation: tensors, operations, the backward pass, and the hooks that strategies use.

tensor.py          a tensor, a node, and `record`, the one way to make nodes
parameter.py       a leaf that outlives the graph
backward.py        the backward pass
modes.py           whether operations are recorded
operands.py        what every operation does with its operands first
operators.py       the operators and methods of a tensor
function.py        operations that a user defines
ops/               the operations, one file each, with their gradients
errors.py          errors of operations and of backward passes
"""

from typing import TYPE_CHECKING

from minidist.core.autograd.backward import BackwardPass as BackwardPass
from minidist.core.autograd.backward import WeightGradStore as WeightGradStore
from minidist.core.autograd.backward import backward as backward
from minidist.core.autograd.backward import backward_hook as backward_hook
from minidist.core.autograd.backward import backward_hooks as backward_hooks
from minidist.core.autograd.backward import current_pass as current_pass
from minidist.core.autograd.backward import is_in_backward as is_in_backward
from minidist.core.autograd.backward import map_tensors as map_tensors
from minidist.core.base.lazy import lazy_imports

from minidist.core.autograd import operators  # isort: skip  # noqa: F401  sets the methods of Tensor

if TYPE_CHECKING:
    from minidist.core.autograd.errors import AutogradError as AutogradError
    from minidist.core.autograd.errors import DtypeError as DtypeError
    from minidist.core.autograd.errors import ShapeError as ShapeError
    from minidist.core.autograd.errors import VersionError as VersionError
    from minidist.core.autograd.function import Function as Function
    from minidist.core.autograd.modes import contribution_recorder as contribution_recorder
    from minidist.core.autograd.modes import is_grad_enabled as is_grad_enabled
    from minidist.core.autograd.modes import no_grad as no_grad
    from minidist.core.autograd.modes import set_grad_enabled as set_grad_enabled
    from minidist.core.autograd.ops.attention import causal_attention as causal_attention
    from minidist.core.autograd.ops.cross_entropy import cross_entropy as cross_entropy
    from minidist.core.autograd.ops.elementwise import add as add
    from minidist.core.autograd.ops.elementwise import div as div
    from minidist.core.autograd.ops.elementwise import dropout as dropout
    from minidist.core.autograd.ops.elementwise import gelu as gelu
    from minidist.core.autograd.ops.elementwise import mul as mul
    from minidist.core.autograd.ops.elementwise import neg as neg
    from minidist.core.autograd.ops.elementwise import sub as sub
    from minidist.core.autograd.ops.layer_norm import layer_norm as layer_norm
    from minidist.core.autograd.ops.layer_norm import rms_norm as rms_norm
    from minidist.core.autograd.ops.linear import embedding as embedding
    from minidist.core.autograd.ops.linear import linear as linear
    from minidist.core.autograd.ops.linear import matmul as matmul
    from minidist.core.autograd.ops.reductions import mean as mean
    from minidist.core.autograd.ops.reductions import softmax as softmax
    from minidist.core.autograd.ops.reductions import sum as sum
    from minidist.core.autograd.ops.shaping import concatenate as concatenate
    from minidist.core.autograd.ops.shaping import getitem as getitem
    from minidist.core.autograd.ops.shaping import reshape as reshape
    from minidist.core.autograd.parameter import BackwardObserver as BackwardObserver
    from minidist.core.autograd.parameter import Gradient as Gradient
    from minidist.core.autograd.parameter import Parameter as Parameter
    from minidist.core.autograd.tensor import MeanOfRows as MeanOfRows
    from minidist.core.autograd.tensor import Node as Node
    from minidist.core.autograd.tensor import SavedTensor as SavedTensor
    from minidist.core.autograd.tensor import Tensor as Tensor
    from minidist.core.autograd.tensor import record as record
    from minidist.core.base.watchers import FlopCounter as FlopCounter
    from minidist.core.base.watchers import current_flop_counter as current_flop_counter
__getattr__, __dir__ = lazy_imports(__name__, __file__)
