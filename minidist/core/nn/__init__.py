"""Layers and models on the autograd engine. Nothing here communicates or depends on ranks.

module.py           the tree of parameters with a forward function
flat.py             the parameters of a unit in one flat array
layers.py           Linear, GPT-2's Conv1D, Embedding, LayerNorm and the multilayer perceptron
experts.py          a mixture of experts
gpt.py              GPT-2's architecture with GPT-2's names, and what it has in common with Llama
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.autograd import Parameter, cross_entropy
    from minidist.core.nn.experts import MixtureOfExperts
    from minidist.core.nn.flat import FlatParameters
    from minidist.core.nn.gpt import GPT, Block, GPTConfig
    from minidist.core.nn.layers import MLP, Conv1D, Embedding, LayerNorm, Linear
    from minidist.core.nn.module import Module, Sequential
__getattr__, __dir__ = lazy_imports(__name__, __file__)
