"""Context parallelism: the sequence is split over ranks, attention included (ring attention, Ulysses, or all-gather).

Weights are replicated over the context axis and every rank sees a part of the tokens, so each gradient is a summand:
it is summed over the context axis *and* the data axis, also when there is one replica only. `gradient_axes(mesh)` is
the communicator to give to `DistributedDataParallel(..., reduction="sum")`.

positions.py              the global positions of a rank's tokens
split_attention.py        how GPT and Llama call ring attention and all-gather attention
ring_attention.py         ring attention
ring_event.py             ring attention of folded ranks, in a dry run
all_gather_attention.py   all-gather attention, with documents
ulysses.py                Ulysses
ulysses_ring.py           Ulysses among neighbours, and rings between their groups
document_mask.py          the document of each token
"""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports
from minidist.comm import Comm, Mesh

if TYPE_CHECKING:
    from minidist.parallel.context.all_gather_attention import AllGatherAttention as AllGatherAttention
    from minidist.parallel.context.document_mask import document_ids as document_ids
    from minidist.parallel.context.document_mask import documents as documents
    from minidist.parallel.context.positions import part_order as part_order
    from minidist.parallel.context.positions import sequence_positions as sequence_positions
    from minidist.parallel.context.ring_attention import RingAttention as RingAttention
    from minidist.parallel.context.ulysses import UlyssesAttention as UlyssesAttention
    from minidist.parallel.context.ulysses_ring import UlyssesRingAttention as UlyssesRingAttention


def gradient_axes(mesh: Mesh) -> Comm:
    """Return the communicator over which a gradient is summed: of the axes dp and cp, those that the mesh has."""
    return mesh[tuple(name for name in mesh.axis_names if name in ("dp", "cp"))]


__getattr__, __dir__ = lazy_imports(__name__, __file__)
