"""Reverse-mode automatic differentiation: tensors, operations, the backward pass, and the hooks that strategies use."""

from minidist.autograd.tensor import AutogradError, DtypeError, ShapeError, Tensor, record  # isort: skip
from minidist.autograd.backward import BackwardPass, DeferredWeights, after_node_hook, backward, on_ready_hook
from minidist.autograd.modes import Meter, enable_grad, is_grad_enabled, meter, no_grad, set_grad_enabled
from minidist.autograd.node import Node
from minidist.autograd.parameter import Parameter, ParameterUse, VersionError, contribution_recorder

__all__ = [
    "AutogradError", "BackwardPass", "DeferredWeights", "DtypeError", "Meter", "Node", "Parameter", "ParameterUse",
    "ShapeError", "Tensor", "VersionError", "after_node_hook", "backward", "contribution_recorder", "enable_grad",
    "is_grad_enabled", "meter", "no_grad", "on_ready_hook", "record", "set_grad_enabled",
]  # fmt: skip
