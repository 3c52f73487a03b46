"""Context parallelism: the sequence is split over ranks, attention included (ring attention, Ulysses, or all-gather).

Weights are replicated over the context axis and every rank sees a part of the tokens, so each gradient is a summand:
it is summed over the context axis *and* the data axis, also when there is one replica only. `gradient_axes(mesh)` is
the communicator to give to `DistributedDataParallel(..., reduction="sum")`.

positions.py              the global positions of a rank's tokens
split_attention.py        how GPT and Llama call ring attention and all-gather attention
ring_attention.py         ring attention
ulysses.py                Ulysses
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports
from minidist.core.comm import Comm, Mesh

if TYPE_CHECKING:
    from minidist.core.parallel.context.positions import part_order as part_order
    from minidist.core.parallel.context.positions import sequence_positions as sequence_positions
    from minidist.core.parallel.context.ring_attention import RingAttention as RingAttention
    from minidist.core.parallel.context.ulysses import UlyssesAttention as UlyssesAttention


def gradient_axes(mesh: Mesh) -> Comm:
    """Return the communicator over which a gradient is summed: of the axes dp and cp, those that the mesh has."""
    return mesh[tuple(name for name in mesh.axis_names if name in ("dp", "cp"))]


__getattr__, __dir__ = lazy_imports(__name__, __file__)
