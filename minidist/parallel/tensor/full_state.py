"""Load the whole arrays of a model into the same model after it was sharded; `full_state_dict` is the way back.

Proved by: tests/parallel/test_tensor.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, nearest
from minidist.nn.module import Module
from minidist.parallel.tensor.sharding import MeshLike, local_tensor


def load_full_state_dict(
    module: Module, state: Mapping[str, Any], mesh: MeshLike, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load whole arrays into a model that is sharded already, as `Module.load_state_dict`: each rank takes its shards.

    A name that is missing or unknown is an error with strict; a shape that differs from the *global* one always. Sends
    nothing.
    """
    shards: dict[str, Any] = {}
    own, buffers = dict(module._all_parameters()), dict(module.named_buffers())
    for name, value in state.items():
        if name in own:
            layout, value = own[name].layout, xp.as_array(value)
            shape = own[name].shape if layout is None else layout.global_shape
            if value.shape != tuple(shape):
                raise UsageError(
                    f"load_full_state_dict: {name!r} has shape {value.shape}; the whole parameter has {tuple(shape)}"
                )
            value = local_tensor(value, layout, mesh)
        elif strict and name not in buffers:
            raise UsageError(f"load_full_state_dict: the model has no {name!r}{nearest(name, own)}")
        shards[name] = value
    return module.load_state_dict(shards, strict)
