"""Layers and models on the autograd engine. Nothing here communicates or knows of ranks."""

from minidist.autograd import Parameter, cross_entropy, mse_loss
from minidist.nn.batch_norm import BatchNorm
from minidist.nn.convolution import Conv2d
from minidist.nn.dropout import AttentionDropout, Dropout
from minidist.nn.embedding import Embedding
from minidist.nn.experts import MixtureOfExperts
from minidist.nn.flat import FlatParameters
from minidist.nn.gpt import GPT, Block, GPTConfig
from minidist.nn.language_model import LanguageModel, TiedHead
from minidist.nn.linear import Conv1D, Linear
from minidist.nn.llama import Llama, LlamaBlock, LlamaConfig
from minidist.nn.mlp import MLP
from minidist.nn.module import HookHandle, Identity, Module, ModuleDict, ModuleList, Sequential
from minidist.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "GPT",
    "MLP",
    "AttentionDropout",
    "BatchNorm",
    "Block",
    "Conv1D",
    "Conv2d",
    "Dropout",
    "Embedding",
    "FlatParameters",
    "GPTConfig",
    "HookHandle",
    "Identity",
    "LanguageModel",
    "LayerNorm",
    "Linear",
    "Llama",
    "LlamaBlock",
    "LlamaConfig",
    "MixtureOfExperts",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "RMSNorm",
    "Sequential",
    "TiedHead",
    "cross_entropy",
    "mse_loss",
]
