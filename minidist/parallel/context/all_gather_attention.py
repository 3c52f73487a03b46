"""All-gather attention: the keys and values of all ranks are gathered, then each rank's queries meet those they see.

    rank 0   Q of chunks 0 and 3     all-gather K, V     chunk 0 x keys of chunk 0      chunk 3 x keys of chunks 0..3
    rank 1   Q of chunks 1 and 2                         chunk 1 x keys of chunks 0..1  chunk 2 x keys of chunks 0..2

A rank holds chunk i and chunk 2P-1-i of 2P (zig-zag), so all ranks compute equally long. Unlike in a ring, no message
overlaps with computing, and every rank holds all keys of a layer. With few key-value heads these are smaller than the
queries, and any mask is possible: here documents (`documents`), whose masks differ from row to row. A ring would
need a mask for each block, and many blocks would travel to ranks that see nothing of them. Backward reduce-scatters the
gradients of K and V to their owners.

A rank sends 2 (P-1) N/P h numbers forward, and as many backward, where a ring sends 2 (2P-1) N/P h (purposes
tensor_forward and tensor_backward). Source: Llama 3, arXiv:2407.21783, section 3.3.2.

Proved by: tests/parallel/test_all_gather_attention.py
"""

from typing import Any

from minidist.core.autograd import Tensor, reshape, softmax
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import is_half
from minidist.core.base.errors import ShapeError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather, reduce_scatter
from minidist.core.comm import Comm
from minidist.core.nn.module import Module
from minidist.core.parallel.context_parallel import RingAttention, chunks_of, zigzag_positions
from minidist.core.parallel.tensor_parallel import contiguous
from minidist.nn import Function, concatenate, stack, swapaxes, transpose, where
from minidist.nn.ops.dropout import WeightDropout
from minidist.nn.ops.functions import astype
from minidist.parallel.context.document_mask import current_documents


class AllGatherAttention(Module):
    """Causal attention over `length` tokens, inside documents if the call is made in the context `documents(ids)`.

    Each rank of `comm` holds its zig-zag part of the tokens (`zigzag_positions`); without a communicator this process
    holds all. Called as `RingAttention` is, by GPT and by Llama.
    """

    forward: Any = RingAttention.forward  # either form, as it is called

    def __init__(self, comm: Comm | None, length: int) -> None:
        self.comm = self.sequence_comm = comm
        self.length = length
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        self.rows = len(self.positions())

    def positions(self) -> xp.Array:
        """Return the global positions of this rank's tokens."""
        return zigzag_positions(self.length, self.rank, self.size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout | None = None) -> Tensor:
        """Return the outputs (batch, T_local, heads, n) of this rank's queries. Raises ShapeError for wrong shapes."""
        ids = current_documents()
        self._check(q, k, v, ids)

        # All keys and values, in the order of the text; 16-bit ones travel as they are and are upcast here.
        dtype = q.dtype
        both = stack([k, v])
        if self.comm is not None and self.size > 1:
            both = _GatherSequence.apply(both, self.comm, self.length)
        if is_half(dtype):
            q, both = astype(q, xp.float32), astype(both, xp.float32)

        # A chunk of queries meets the keys up to its own end.
        keep = None if dropout is None else dropout.mask(q.shape[0], q.shape[2], self.length)
        parts, done = [], 0
        for start, end in chunks_of(self.length, self.rank, self.size):
            if end > start:
                rows = slice(done, done + end - start)
                visible = _visible(start, end, ids)
                dropped = None if dropout is None or keep is None else keep[:, :, start:end, :end] * dropout.scale
                parts.append(_mix(q[:, rows], both[0][:, :end], both[1][:, :end], visible, dropped))
                done = rows.stop
        mixed = concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        return astype(mixed, dtype) if is_half(dtype) else mixed

    def _check(self, q: Tensor, k: Tensor, v: Tensor, ids: xp.Array | None) -> None:
        if q.ndim != 4 or q.shape[1] != self.rows or k.shape != v.shape or k.shape[1] != self.rows:
            raise ShapeError(
                f"all-gather attention: q {q.shape}, k {k.shape}, v {v.shape}; rank {self.rank} of {self.size} holds"
                f" {self.rows} of {self.length} tokens: (batch, {self.rows}, heads, size)"
            )
        if ids is not None and ids.shape != (q.shape[0], self.length):
            raise ShapeError(f"document ids have shape {ids.shape}; they must be ({q.shape[0]}, {self.length})")


def _visible(start: int, end: int, ids: xp.Array | None) -> xp.Array:
    """Return which of the keys before `end` the queries [start, end) see: (1 or batch, 1, 1, queries, keys)."""
    causal: xp.Array = xp.device_arange(end) <= xp.device_arange(start, end)[:, None]
    if ids is None:
        return causal[None, None, None]
    together: xp.Array = ids[:, start:end, None] == ids[:, None, :end]
    return (causal & together)[:, None, None]


def _mix(q: Tensor, k: Tensor, v: Tensor, visible: xp.Array, dropped: xp.Array | None) -> Tensor:
    """Return the outputs (batch, T, heads, n) of queries that see some keys; heads share key-value heads in order."""
    batch, rows, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    shared = heads // kv_heads

    # The heads that share keys are more rows of one product: (batch, kv heads, heads of each x T, keys).
    grouped = transpose(reshape(q, (batch, rows, kv_heads, shared, size)), (0, 2, 3, 1, 4))
    grouped = reshape(grouped, (batch, kv_heads, shared * rows, size)) * size**-0.5
    scores = grouped @ swapaxes(transpose(k, (0, 2, 1, 3)), 2, 3)
    scores = reshape(scores, (batch, kv_heads, shared, rows, keys))
    weights = softmax(where(visible, scores, -xp.inf))
    if dropped is not None:
        weights = weights * Tensor(xp.as_array(dropped.reshape(weights.shape), weights.dtype))

    mixed = reshape(weights, (batch, kv_heads, shared * rows, keys)) @ transpose(v, (0, 2, 1, 3))
    mixed = transpose(reshape(mixed, (batch, kv_heads, shared, rows, size)), (0, 3, 1, 2, 4))
    return reshape(mixed, (batch, rows, heads, size))


class _GatherSequence(Function):
    """(2, batch, own tokens, heads, n) -> (2, batch, all tokens, heads, n), in the order of the text."""

    @staticmethod
    def forward(ctx: Any, x: xp.Array, comm: Comm, length: int) -> xp.Array:
        ctx.settings = comm, length
        parts = [zigzag_positions(length, rank, comm.size) for rank in range(comm.size)]
        front = contiguous(xp.moveaxis(x, 2, 0))
        row = front.size // len(front)
        comm.advance_clock("tensor_forward")
        with purpose("tensor_forward"):
            gathered = all_gather(comm, front.reshape(-1), counts=[len(part) * row for part in parts])

        # Rank by rank they came; they go to their places in the text.
        whole = xp.empty((length, *front.shape[1:]), x.dtype, x)
        whole[xp.concatenate(parts)] = gathered.reshape(whole.shape)
        return contiguous(xp.moveaxis(whole, 0, 2))

    @staticmethod
    def backward(ctx: Any, grad: xp.Array) -> xp.Array:
        comm, length = ctx.settings
        parts = [zigzag_positions(length, rank, comm.size) for rank in range(comm.size)]
        front = xp.moveaxis(grad, 2, 0)[xp.concatenate(parts)]
        row = front.size // length
        comm.advance_clock("tensor_backward")
        with purpose("tensor_backward"):
            mine = reduce_scatter(comm, contiguous(front).reshape(-1), counts=[len(part) * row for part in parts])
        return contiguous(xp.moveaxis(mine.reshape(-1, *front.shape[1:]), 0, 2))


def mask_documents(model: Module, length: int) -> None:
    """Let attention over whole sequences of `length` tokens stay inside documents; see `documents`."""
    whole = AllGatherAttention(None, length)
    for module in model.modules():
        if hasattr(module, "attention_fn"):
            module.attention_fn = whole
