"""The gate of a SwiGLU layer as one node: silu(gate) * up, silu(x) = x sigmoid(x) (Shazeer, "GLU Variants", 2020)."""

from operator import itemgetter

from minidist.autograd.operands import mismatch, pair
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element, of one shape and dtype."""
    gate, up = pair("swiglu", gate, up)
    if gate.shape != up.shape:
        raise mismatch("swiglu", gate, up, "must be equal")
    sigmoid = xp.tanh(gate.data * 0.5) * 0.5 + 0.5
    kept_gate, kept_up = gate.saved(), up.saved()

    def prepare(g: xp.Array) -> tuple[xp.Array, xp.Array]:
        silu = kept_gate.data * sigmoid
        return g * kept_up.data * (sigmoid + silu * (1 - sigmoid)), g * silu

    edges = ((gate, itemgetter(0)), (up, itemgetter(1)))
    return record("swiglu", gate.data * sigmoid * up.data, edges, prepare=prepare, flops=6 * gate.size, saved=(sigmoid,))
