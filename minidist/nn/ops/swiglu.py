"""The gate of a SwiGLU layer as one node: silu(gate) * up, silu(x) = x sigmoid(x) (Shazeer, "GLU Variants", 2020).

Proved by: tests/nn/test_llama.py
"""

from operator import itemgetter

from minidist.core.autograd.operators import mismatch, operands
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element, of one shape and dtype."""
    gate, up = operands("swiglu", gate, up)
    if gate.shape != up.shape:
        raise mismatch("swiglu", gate, up, "must be equal")
    values = gate.data
    sigmoid = xp.tanh(values * 0.5) * 0.5 + 0.5
    result = values * sigmoid * up.data
    kept = gate.save(sigmoid)
    del sigmoid
    kept_gate, kept_up = gate.saved(), up.saved()

    def prepare(g: xp.Array) -> tuple[xp.Array, xp.Array]:
        s = kept.data
        silu = kept_gate.data * s
        return g * kept_up.data * (s + silu * (1 - s)), g * silu

    edges = ((gate, itemgetter(0)), (up, itemgetter(1)))
    return record("swiglu", result, edges, prepare=prepare, cost=6 * gate.size, saved=(kept.stored,))
