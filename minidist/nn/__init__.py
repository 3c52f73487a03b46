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
    from minidist.autograd import Parameter as Parameter
    from minidist.autograd import cross_entropy as cross_entropy
    from minidist.autograd import mse_loss as mse_loss
    from minidist.nn.batch_norm import BatchNorm as BatchNorm
    from minidist.nn.cnn import CNN as CNN
    from minidist.nn.containers import ModuleDict as ModuleDict
    from minidist.nn.containers import ModuleList as ModuleList
    from minidist.nn.convolution import Conv2d as Conv2d
    from minidist.nn.dropout import AttentionDropout as AttentionDropout
    from minidist.nn.dropout import Dropout as Dropout
    from minidist.nn.embedding import Embedding as Embedding
    from minidist.nn.experts import MixtureOfExperts as MixtureOfExperts
    from minidist.nn.flat import FlatParameters as FlatParameters
    from minidist.nn.gpt import GPT as GPT
    from minidist.nn.gpt import Block as Block
    from minidist.nn.gpt import GPTConfig as GPTConfig
    from minidist.nn.language_model import LanguageModel as LanguageModel
    from minidist.nn.language_model import TiedHead as TiedHead
    from minidist.nn.linear import Conv1D as Conv1D
    from minidist.nn.linear import Linear as Linear
    from minidist.nn.llama import Llama as Llama
    from minidist.nn.llama import LlamaBlock as LlamaBlock
    from minidist.nn.llama import LlamaConfig as LlamaConfig
    from minidist.nn.llama import SwiGLUExperts as SwiGLUExperts
    from minidist.nn.mlp import MLP as MLP
    from minidist.nn.module import HookHandle as HookHandle
    from minidist.nn.module import Identity as Identity
    from minidist.nn.module import Module as Module
    from minidist.nn.module import Sequential as Sequential
    from minidist.nn.norm import LayerNorm as LayerNorm
    from minidist.nn.norm import RMSNorm as RMSNorm

__getattr__, __dir__ = lazy_imports(__name__, __file__)
