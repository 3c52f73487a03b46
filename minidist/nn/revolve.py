"""Segments inside segments: the fewest repeated layers that a number of kept inputs allows.

    slots = 2, x ─▶ 1 2 3 4 5 6 ─▶       keep x and the input of a middle layer; in backward run the second part first,
                          ▲ kept         then start again from x with the slot that became free

`revolve_advances(L, slots)` is the number of repeated layers in closed form: r L - C(slots + r, r - 1), where r is the
least number with C(slots + r, r) >= L.

Source: Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 2000.

Proved by: tests/nn/test_segments.py
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import comb

from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.nn import checkpoint

Layer = Callable[[Tensor], Tensor]


def revolve(functions: Sequence[Layer], x: Tensor, slots: int) -> Tensor:
    """functions[-1](...functions[0](x)); backward keeps at most `slots` inputs of inner chains and repeats few layers.

    How many: `revolve_advances`, the fewest possible.
    """
    if slots < 1 or not functions:
        raise UsageError(f"revolve over {len(functions)} layers with {slots} slots; it needs at least one of each")
    if len(functions) == 1:
        return functions[0](x)

    # One slot: nothing can be kept on the way, so everything before the last layer runs again for each layer.
    if slots == 1:
        return functions[-1](checkpoint(lambda value: revolve(functions[:-1], value, 1), x))

    # Keep the input of layer `middle`: what is behind it has one slot less, what is before it gets the slot back.
    middle = _best_cut(len(functions), slots)
    y = checkpoint(lambda value: revolve(functions[:middle], value, slots), x)
    return revolve(functions[middle:], y, slots - 1)


@cache
def _best_cut(layers: int, slots: int) -> int:
    """Return how many layers to run before the next input is kept."""
    return min(range(1, layers), key=lambda m: m + revolve_advances(layers - m, slots - 1) + revolve_advances(m, slots))


def revolve_advances(layers: int, slots: int) -> int:
    """Return how many layers run, without the one recorded run of each, with `slots` kept inputs (x is one of them)."""
    # A single layer is recorded at once.
    if layers <= 1:
        return 0
    # The least r with C(slots + r, slots) >= layers: no layer runs more than r times in addition.
    repeats = 0
    while comb(slots + repeats, slots) < layers:
        repeats += 1
    return repeats * layers - comb(slots + repeats, repeats - 1)
