"""Layers and models on the autograd engine. Nothing here communicates or knows of ranks.

module.py           the tree of parameters with a forward function
flat.py             the parameters of a unit in one flat array
layers.py           Linear, GPT-2's Conv1D, Embedding, LayerNorm and RMSNorm
dropout.py          dropout whose masks do not depend on the layout
experts.py          a mixture of experts
mlp.py              the multilayer perceptron
gpt.py              GPT-2's architecture under GPT-2's names, and what it has in common with Llama
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.autograd import Parameter as Parameter
    from minidist.core.autograd import cross_entropy as cross_entropy
    from minidist.core.nn.dropout import AttentionDropout as AttentionDropout
    from minidist.core.nn.dropout import Dropout as Dropout
    from minidist.core.nn.experts import MixtureOfExperts as MixtureOfExperts
    from minidist.core.nn.flat import FlatParameters as FlatParameters
    from minidist.core.nn.gpt import GPT as GPT
    from minidist.core.nn.gpt import Block as Block
    from minidist.core.nn.gpt import GPTConfig as GPTConfig
    from minidist.core.nn.gpt import LanguageModel as LanguageModel
    from minidist.core.nn.gpt import TiedHead as TiedHead
    from minidist.core.nn.layers import Conv1D as Conv1D
    from minidist.core.nn.layers import Embedding as Embedding
    from minidist.core.nn.layers import LayerNorm as LayerNorm
    from minidist.core.nn.layers import Linear as Linear
    from minidist.core.nn.layers import RMSNorm as RMSNorm
    from minidist.core.nn.mlp import MLP as MLP
    from minidist.core.nn.module import HookHandle as HookHandle
    from minidist.core.nn.module import Identity as Identity
    from minidist.core.nn.module import Module as Module
    from minidist.core.nn.module import Sequential as Sequential
__getattr__, __dir__ = lazy_imports(__name__, __file__)
