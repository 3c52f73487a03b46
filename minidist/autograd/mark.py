"""A marker is an identity on the tape: a place where strategies do something in forward and in backward.

Backward reaches a marker when the gradient of the marked tensor is complete, which is after everything recorded later
and before everything recorded earlier. A marker on a unit's output says "the unit's backward begins" (FSDP gathers),
one on its input says "the unit's backward is done".
"""

from collections.abc import Callable
from typing import Any

from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp


def mark(
    x: Tensor, name: str, on_forward: Callable[[], None] | None = None, on_backward: Callable[[], None] | None = None
) -> Tensor:
    """x again, with on_forward() called now and on_backward() when backward passes this point.

    When x needs no gradient (the first unit's input), backward never passes here and on_backward is not called.
    """
    if on_forward is not None:
        on_forward()

    def passed(g: xp.Array) -> xp.Array:
        if on_backward is not None:
            on_backward()
        return g

    return record(f"mark {name}", x.data, ((x, None),), prepare=passed, flops=0)


def mark_all(value: Any, name: str, on_backward: Callable[[], None]) -> Any:
    """`value` with every tensor marked that needs a gradient, in tuples, lists and dicts too; anything else as it is."""
    if isinstance(value, Tensor):
        return value if value.node is None else mark(value, name, on_backward=on_backward)
    if isinstance(value, dict):
        return {key: mark_all(item, name, on_backward) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*(mark_all(item, name, on_backward) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mark_all(item, name, on_backward) for item in value)
    return value
