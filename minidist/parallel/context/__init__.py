"""Context parallelism: the sequence is split over ranks, attention included (ring attention, or Ulysses).

Weights are replicated over the context axis and every rank sees a part of the tokens, so each gradient is a summand:
it is summed over the context axis *and* the data axis, also when there is one replica only. `gradient_axes(mesh)` is
the communicator to give to `DistributedDataParallel(..., reduction="sum")`.

positions.py        the global positions of a rank's tokens
ring_attention.py   ring attention
ulysses.py          Ulysses
"""

from minidist.comm import Comm, Mesh
from minidist.parallel.context.positions import part_order, sequence_positions
from minidist.parallel.context.ring_attention import RingAttention
from minidist.parallel.context.ulysses import UlyssesAttention


def gradient_axes(mesh: Mesh) -> Comm:
    """Return the communicator over which a gradient is summed: of the axes dp and cp, those that the mesh has."""
    return mesh[tuple(name for name in mesh.axis_names if name in ("dp", "cp"))]


__all__ = ["RingAttention", "UlyssesAttention", "gradient_axes", "part_order", "sequence_positions"]
