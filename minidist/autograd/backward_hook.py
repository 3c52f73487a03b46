"""Backward hooks on tensors: a strategy learns how far the backward pass has come.

A hook is an identity node on the tape. Backward reaches it when the gradient of the tensor is complete, which is after
everything recorded later and before everything recorded earlier:

    x ── backward_hook ── layer ── backward_hook ── y        forward ──▶
         [2] the layer's        [1] the layer's
         backward is done       backward begins               ◀── backward

So FSDP gathers a layer's parameters in [1] and reduces their gradients in [2].

Proved by: tests/autograd/test_extending.py, tests/autograd/test_backward.py
"""

from collections.abc import Callable
from typing import Any

from minidist.autograd.backward import BackwardPass
from minidist.autograd.tensor import Tensor, record


def backward_hook(x: Tensor, hook: Callable[[BackwardPass], None], name: str = "backward hook") -> Tensor:
    """Return x as a tensor behind a node that calls hook(the pass) when backward reaches it.

    When x needs no gradient (the input of the first layer), backward never gets here and the hook is not called.
    """

    def call(running: BackwardPass, gradient: Any) -> Any:
        hook(running)
        return gradient

    return record(name, x.data, ((x, None),), hook=call, cost=0)


def backward_hooks(value: Any, hook: Callable[[BackwardPass], None], name: str = "backward hook") -> Any:
    """Return `value` with a `backward_hook` on every tensor in it that needs a gradient.

    Looks into tuples, named tuples, lists and dicts; everything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return value if value.node is None else backward_hook(value, hook, name)
    if isinstance(value, dict):
        return {key: backward_hooks(item, hook, name) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*(backward_hooks(item, hook, name) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(backward_hooks(item, hook, name) for item in value)
    return value
