"""Layers and models on the autograd engine. Knows no rank."""

from minidist.autograd import Parameter
from minidist.nn.flat import FlatParameters
from minidist.nn.linear import Conv1D, Linear
from minidist.nn.mlp import MLP
from minidist.nn.module import Module, Sequential

__all__ = ["MLP", "Conv1D", "FlatParameters", "Linear", "Module", "Parameter", "Sequential"]
