"""Documents: several texts in one sequence, in which no token sees another text's.

    tokens   a b . c d e . f        ids   0 0 0 1 1 1 1 2        a token belongs to the document that it ends
    f sees   - - - - - - - f        c d e sees c, d, e only: the causal mask, block-diagonal

Long sequences are filled with many short documents. A mask by document id keeps attention inside each of them (Llama 3,
arXiv:2407.21783, section 3.2). A rank of a split sequence needs the ids of the whole one: its keys lie everywhere.

Proved by: tests/parallel/test_all_gather_attention.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from minidist.core.base import arrays as xp

_ids: ContextVar[xp.Array | None] = ContextVar("minidist_document_ids", default=None)


def document_ids(tokens: xp.Array, separator: int) -> xp.Array:
    """Return the document of each token (batch, T): the number of separators before it in its row."""
    ends = (tokens == separator).astype(xp.int64)
    ids: xp.Array = ends.cumsum(axis=1) - ends
    return ids


@contextmanager
def documents(ids: xp.Array | None) -> Iterator[None]:
    """Attention in the block stays inside documents. ids: (batch, T) of the whole sequences; None: one document each.

    Ids on the host, where data are made, are brought to the device.

    A recomputed block has the ids of its forward pass, because recomputation runs in that context.
    """
    token = _ids.set(None if ids is None else xp.to_device(ids))
    try:
        yield
    finally:
        _ids.reset(token)


def current_documents() -> xp.Array | None:
    """Return the ids of the current batch; None outside `documents`."""
    return _ids.get()
