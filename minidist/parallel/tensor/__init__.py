"""Tensor parallelism in addition to the core's: the sequence split between regions, Llama, whole arrays and norms.

gathering.py           outputs and logits of all ranks, and the plan of an MLP
sequence_regions.py    the borders of a region when the sequence is split outside of it
sequence_layers.py     the layers with them, and the plan of a GPT
sequence_parallel.py   norms and dropout on a part of the sequence
styles.py              how one module is split, by PyTorch's names
llama.py               what a Llama needs in addition
shard_boxes.py         where a shard lies in the whole parameter
full_state.py          the whole arrays of a sharded model
grad_norm.py           the norm of the global gradient
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.tensor.full_state import full_state_dict, full_tensor, load_full_state_dict, local_tensor
    from minidist.parallel.tensor.grad_norm import clip_grad_norm_
    from minidist.parallel.tensor.llama import PrepareModuleInput, llama_plan
    from minidist.parallel.tensor.shard_boxes import boxes
__getattr__, __dir__ = lazy_imports(__name__, __file__)
