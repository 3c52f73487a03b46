"""Reverse-mode automatic differentiation: tensors, operations, the backward pass, and the hooks that strategies use.

tensor.py          a tensor, a node, `record`, which makes all nodes, and whether operations are recorded
parameter.py       a leaf that outlives the graph
backward.py        the backward pass
operators.py       the operators and methods of a tensor, and what they make of their operands
ops/               the operations, one file each, with their gradients
"""

from typing import TYPE_CHECKING

from minidist.core.autograd.backward import BackwardPass, backward, backward_hook, backward_hooks, current_pass
from minidist.core.base.lazy import lazy_imports

import minidist.core.autograd.ops.linear  # isort: skip  sets operators of a tensor

if TYPE_CHECKING:
    from minidist.core.autograd.operators import add, div, getitem, mean, mul, reshape, sum
    from minidist.core.autograd.ops.attention import causal_attention
    from minidist.core.autograd.ops.cross_entropy import cross_entropy, softmax
    from minidist.core.autograd.ops.layer_norm import layer_norm
    from minidist.core.autograd.ops.linear import embedding, gelu, linear, matmul
    from minidist.core.autograd.parameter import BackwardObserver, Parameter
    from minidist.core.autograd.tensor import Node, Tensor, contribution_recorder, is_grad_enabled, no_grad, record
    from minidist.core.base.errors import AutogradError, DtypeError, ShapeError, VersionError
__getattr__, __dir__ = lazy_imports(__name__, __file__)
