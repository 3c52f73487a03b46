"""Context parallelism in addition to ring attention.

ring_event.py             ring attention of folded ranks, in a dry run
all_gather_attention.py   all-gather attention, with documents
ulysses.py                heads exchanged for tokens, around the attention of one device
ulysses_ring.py           Ulysses among neighbours, and rings between their groups
orders.py                 which tokens each rank holds
document_mask.py          the document of each token
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.parallel.context.all_gather_attention import AllGatherAttention
    from minidist.parallel.context.document_mask import document_ids, documents
    from minidist.parallel.context.ulysses_ring import UlyssesRingAttention
__getattr__, __dir__ = lazy_imports(__name__, __file__)
