"""A marker is an identity on the tape: a place where strategies do something in forward and in backward.

Backward reaches a marker when the gradient of the marked tensor is complete, which is after everything recorded later
and before everything recorded earlier. A marker on a unit's output says "the unit's backward begins" (FSDP gathers),
one on its input says "the unit's backward is done".
"""

from collections.abc import Callable

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
