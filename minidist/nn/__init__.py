"""Layers and models on the autograd engine. Nothing here communicates or knows of ranks.

module.py           the tree of parameters with a forward function
containers.py       lists and dicts of modules
state.py            loading the values of a model
refusals.py         what a module's call refuses
moving.py           how a model gets to a device
describe.py         what `print(model)` shows
flat.py             the parameters of a unit in one flat array
linear.py           Linear, and GPT-2's Conv1D
embedding.py        the look-up of rows by number
norm.py             layer norm and RMS norm
batch_norm.py       batch normalisation with statistics of each micro-batch
convolution.py      convolution over images
cnn.py              a small residual network for images
dropout.py          dropout whose masks do not depend on the layout
experts.py          a mixture of experts
mlp.py              the multilayer perceptron
language_model.py   what GPT and Llama have in common
gpt.py              GPT-2's architecture under GPT-2's names
llama.py            Llama's architecture under Llama's names
kv_cache.py         keys and values of tokens that were seen, for generation
composite.py        a transformer block without fused operations, which memory formulas count
recompute.py        which parts of a model are computed twice
segments.py         a chain of layers in recomputed segments
revolve.py          segments inside segments
"""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.autograd import Parameter, cross_entropy, mse_loss
    from minidist.nn.batch_norm import BatchNorm
    from minidist.nn.cnn import CNN
    from minidist.nn.containers import ModuleDict, ModuleList
    from minidist.nn.convolution import Conv2d
    from minidist.nn.dropout import AttentionDropout, Dropout
    from minidist.nn.embedding import Embedding
    from minidist.nn.experts import MixtureOfExperts
    from minidist.nn.flat import FlatParameters
    from minidist.nn.gpt import GPT, Block, GPTConfig
    from minidist.nn.language_model import LanguageModel, TiedHead
    from minidist.nn.linear import Conv1D, Linear
    from minidist.nn.llama import Llama, LlamaBlock, LlamaConfig, SwiGLUExperts
    from minidist.nn.mlp import MLP
    from minidist.nn.module import HookHandle, Identity, Module, Sequential
    from minidist.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "CNN",
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
    "SwiGLUExperts",
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

__getattr__, __dir__ = lazy_imports(__name__, __file__)
