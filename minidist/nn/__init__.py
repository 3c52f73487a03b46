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
    from minidist.core.autograd import Parameter
    from minidist.core.nn import Embedding, LayerNorm, Linear, Module, Sequential
    from minidist.nn.batch_norm import BatchNorm
    from minidist.nn.buffers import named_buffers
    from minidist.nn.cnn import CNN
    from minidist.nn.containers import ModuleDict, ModuleList
    from minidist.nn.convolution import Conv2d
    from minidist.nn.dropout import AttentionDropout, Dropout
    from minidist.nn.llama import Llama, LlamaBlock, LlamaConfig, SwiGLUExperts
    from minidist.nn.norms import RMSNorm
    from minidist.nn.ops.checkpoint import checkpoint
    from minidist.nn.ops.comparisons import absolute, maximum, minimum, sigmoid, where
    from minidist.nn.ops.composite import causal_attention_composite, gelu_composite, layer_norm_composite
    from minidist.nn.ops.finite_differences import gradcheck
    from minidist.nn.ops.function import Function
    from minidist.nn.ops.functions import exp, log, log_softmax, max, neg, pow, relu, sqrt, sub, tanh
    from minidist.nn.ops.grouped_attention import causal_attention_heads, grouped_query_attention
    from minidist.nn.ops.in_place import detect_in_place_changes
    from minidist.nn.ops.losses import mse_loss
    from minidist.nn.ops.precision import HalfOperand
    from minidist.nn.ops.rms_norm import rms_norm
    from minidist.nn.ops.rotary import rotary, rotary_angles
    from minidist.nn.ops.shaping import broadcast_to, concatenate, split, stack, swapaxes, transpose
    from minidist.nn.ops.swiglu import swiglu
__getattr__, __dir__ = lazy_imports(__name__, __file__)
