"""Layers, models and operations: those of PyTorch's `torch.nn` that the core has, more of them, and recomputation.

ops/                operations that the core does without
containers.py       lists and dicts of modules
buffers.py          arrays that are state and not trained
dropout.py          dropout whose masks do not depend on the layout
norms.py            RMS norm
state.py            the values of a model as a dict, and its training mode
refusals.py         what a module's call refuses
wrong_arguments.py  why a call has failed
moving.py           how a model gets to a device
describe.py         what `print(model)` shows
batch_norm.py       batch normalisation with statistics of each micro-batch
convolution.py      convolution over images
cnn.py              a small residual network for images
llama.py            Llama's architecture under Llama's names
kv_cache.py         keys and values of tokens that were seen, for generation
recompute.py        which parts of a model are computed twice
segments.py         a chain of layers in recomputed segments
revolve.py          segments inside segments
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.autograd import Parameter as Parameter
    from minidist.core.nn import Embedding as Embedding
    from minidist.core.nn import LayerNorm as LayerNorm
    from minidist.core.nn import Linear as Linear
    from minidist.core.nn import Module as Module
    from minidist.core.nn import Sequential as Sequential
    from minidist.nn.batch_norm import BatchNorm as BatchNorm
    from minidist.nn.buffers import named_buffers as named_buffers
    from minidist.nn.cnn import CNN as CNN
    from minidist.nn.containers import ModuleDict as ModuleDict
    from minidist.nn.containers import ModuleList as ModuleList
    from minidist.nn.convolution import Conv2d as Conv2d
    from minidist.nn.dropout import AttentionDropout as AttentionDropout
    from minidist.nn.dropout import Dropout as Dropout
    from minidist.nn.llama import Llama as Llama
    from minidist.nn.llama import LlamaBlock as LlamaBlock
    from minidist.nn.llama import LlamaConfig as LlamaConfig
    from minidist.nn.llama import SwiGLUExperts as SwiGLUExperts
    from minidist.nn.norms import RMSNorm as RMSNorm
    from minidist.nn.ops.checkpoint import checkpoint as checkpoint
    from minidist.nn.ops.comparisons import absolute as absolute
    from minidist.nn.ops.comparisons import maximum as maximum
    from minidist.nn.ops.comparisons import minimum as minimum
    from minidist.nn.ops.comparisons import sigmoid as sigmoid
    from minidist.nn.ops.comparisons import where as where
    from minidist.nn.ops.composite import causal_attention_composite as causal_attention_composite
    from minidist.nn.ops.composite import gelu_composite as gelu_composite
    from minidist.nn.ops.composite import layer_norm_composite as layer_norm_composite
    from minidist.nn.ops.finite_differences import gradcheck as gradcheck
    from minidist.nn.ops.function import Function as Function
    from minidist.nn.ops.functions import exp as exp
    from minidist.nn.ops.functions import log as log
    from minidist.nn.ops.functions import log_softmax as log_softmax
    from minidist.nn.ops.functions import max as max
    from minidist.nn.ops.functions import neg as neg
    from minidist.nn.ops.functions import pow as pow
    from minidist.nn.ops.functions import relu as relu
    from minidist.nn.ops.functions import sqrt as sqrt
    from minidist.nn.ops.functions import sub as sub
    from minidist.nn.ops.functions import tanh as tanh
    from minidist.nn.ops.grouped_attention import causal_attention_heads as causal_attention_heads
    from minidist.nn.ops.grouped_attention import grouped_query_attention as grouped_query_attention
    from minidist.nn.ops.in_place import detect_in_place_changes as detect_in_place_changes
    from minidist.nn.ops.losses import mse_loss as mse_loss
    from minidist.nn.ops.precision import HalfOperand as HalfOperand
    from minidist.nn.ops.rms_norm import rms_norm as rms_norm
    from minidist.nn.ops.rotary import rotary as rotary
    from minidist.nn.ops.rotary import rotary_angles as rotary_angles
    from minidist.nn.ops.shaping import broadcast_to as broadcast_to
    from minidist.nn.ops.shaping import concatenate as concatenate
    from minidist.nn.ops.shaping import split as split
    from minidist.nn.ops.shaping import stack as stack
    from minidist.nn.ops.shaping import swapaxes as swapaxes
    from minidist.nn.ops.shaping import transpose as transpose
    from minidist.nn.ops.swiglu import swiglu as swiglu
__getattr__, __dir__ = lazy_imports(__name__, __file__)
