"""Ring attention: the sequence split over the ranks, keys and values passed round a ring, past the queries.

    step 0    rank 0: Q0 meets K0 V0    rank 1: Q1 meets K1 V1    rank 2: Q2 meets K2 V2
    step 1    rank 0: Q0 meets K2 V2    rank 1: Q1 meets K0 V0    rank 2: Q2 meets K1 V1      K, V move one rank on
    step 2    rank 0: Q0 meets K1 V1    ...                       while the block before is computed

No rank ever holds all keys. Softmax needs sums over all of them, so partial results are merged as they come (the
*online* softmax): with a running maximum m, sum z and unnormalised output o of each query,

    [1]  m' = max(m, m_block)
    [2]  z' = z exp(m - m') + z_block exp(m_block - m')
    [3]  o' = o exp(m - m') + o_block exp(m_block - m')          at the end: output o / z, and m + log z for backward

Backward goes round again: it recomputes a block's exponentials from the saved log of the sum, and the gradients of K
and V are sent along with their block, and once more, back to its owner. Dropped weights (attention dropout) count in
the sums and are left out of the output.

A causal query sees the keys before it, so with contiguous parts the last rank would compute P times what the first
does. In *zig-zag* order rank r holds chunks r and 2P-1-r of 2P. The queries of one see few keys, those of the other
many; blocks in which no query sees a key are skipped, and all ranks do the same work:

    contiguous   | 0 0 | 1 1 | 2 2 | 3 3 |
    zig-zag      | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |

A rank sends 2 (P-1) N/P h numbers forward (K and V, P-1 hops) and 2 (2P-1) N/P h backward (K, V and, P hops, their
gradients), under purposes tensor_forward and tensor_backward.
Sources: Liu et al., "Ring Attention", 2023; Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018,
algorithm 3; the backward formulas are those of Dao et al., "FlashAttention", 2022, appendix B.2; the balance is that of
Brandon et al., "Striped Attention", 2023, with the chunk pairs of Llama 3 (2024, 3.3.2).

Proved by: tests/parallel/test_context.py, tests/parallel/test_all_gather_attention.py
"""

from operator import itemgetter
from typing import Any

from minidist.core.autograd import Tensor, record, reshape
from minidist.core.autograd.operators import operand
from minidist.core.autograd.ops.attention import Drop
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.base.trace import purpose, track, watchers
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor_parallel import contiguous

Span = tuple[slice, int]  # rows of a rank's array, and the global chunk that they are


def chunks_of(length: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return [start, end) of the two zig-zag chunks of a rank, the earlier first."""
    # 2P chunks: rank r holds number r from the front and number r from the end.
    starts = offsets(chunk_sizes(length, 2 * ranks))
    late = 2 * ranks - 1 - rank
    return [(starts[rank], starts[rank + 1]), (starts[late], starts[late + 1])]


def zigzag_positions(length: int, rank: int, ranks: int) -> xp.Array:
    """Return the global positions, rising, of the tokens that `rank` of `ranks` holds. Ragged lengths are fine.

    Raises UsageError when there are fewer tokens than ranks.
    """
    hooks.check_whole("length", length)
    hooks.refusals().check_tokens(length, ranks)
    return xp.concatenate([xp.device_arange(start, end) for start, end in chunks_of(length, rank, ranks)])


class RingAttention(Module):
    """Causal attention over `length` tokens; each rank holds its zig-zag part (`zigzag_positions`).

    Called with (qkv, heads), qkv (batch, T_local, 3 D), it is an `attention_fn` for GPT, which packs queries, keys and
    values in one array; with (q, k, v) of shapes (batch, T_local, heads or kv_heads, n) one for Llama. The last
    argument may be the dropout of the weights. Every rank must call it for the same layers in the same order.
    """

    def __init__(self, comm: Comm, length: int) -> None:
        check_communicator(comm, "RingAttention")
        self.comm = self.sequence_comm = comm
        self.length = hooks.check_whole("length", length)
        self.spans: list[list[Span]] = []
        for rank in range(comm.size):
            # Local rows [0, b - a) are global chunk `rank`, those behind them chunk 2P-1-rank.
            (a, b), (c, d) = chunks_of(length, rank, comm.size)
            self.spans.append([(slice(0, b - a), rank), (slice(b - a, b - a + d - c), 2 * comm.size - 1 - rank)])
        self.rows = [sum(s.stop - s.start for s, _ in spans) for spans in self.spans]

    def positions(self) -> xp.Array:
        """Return the global positions of this rank's tokens."""
        return zigzag_positions(self.length, self.comm.rank, self.comm.size)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """(qkv, heads) -> (batch, T_local, D), or (q, k, v) -> (batch, T_local, heads, n)."""
        # The second argument is the number of heads if x packs q, k and v; otherwise it is k.
        if isinstance(rest[0], int):
            heads, *dropout = rest
            batch, rows, width = x.shape
            split = reshape(x, (batch, rows, 3, heads, width // (3 * heads)))
            mixed = self.attend(split[:, :, 0], split[:, :, 1], split[:, :, 2], *dropout)
            return reshape(mixed, (batch, rows, width // 3))
        return self.attend(x, *rest)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: Any = None) -> Tensor:
        """Return the outputs (batch, T_local, heads, n) of this rank's queries. Raises ShapeError for wrong shapes."""
        hooks.operation_checks().check_ring(self.comm, q.shape, k.shape, v.shape, self.rows, self.length)

        # Half-precision keys and values travel in 16 bits and are upcast block by block.
        kv_heads = k.shape[2]
        q = operand(q)
        grouped = _grouped(q.data, kv_heads)
        # The mask is drawn for all queries and keys, as on one device; this rank's queries take their rows.
        heads = kv_heads, q.shape[2] // kv_heads
        drop = None if dropout is None else dropout.of_queries(self.positions(), q.shape[0], heads, self.length)

        # One node for the whole ring: backward needs q, k, v, o and the log of the sum, and no block of scores.
        o, log_sum = self._ring_forward(grouped, _grouped(k.data, kv_heads), _grouped(v.data, kv_heads), drop)
        result = q.save(_ungrouped(o))
        kept_q, kept_k, kept_v = q.saved(), k.saved(), v.saved()

        def prepare(g: xp.Array) -> tuple[xp.Array, xp.Array, xp.Array]:
            k, v, q, o = (_grouped(kept.data, kv_heads) for kept in (kept_k, kept_v, kept_q, result))
            dq, dk, dv = self._ring_backward(q, k, v, _grouped(g, kv_heads), o, log_sum, drop)
            return _ungrouped(dq), _ungrouped(dk), _ungrouped(dv)

        edges = ((q, itemgetter(0)), (k, itemgetter(1)), (v, itemgetter(2)))

        # What was computed was counted block by block, between the messages.
        saved = (log_sum,) if drop is None else (log_sum, drop.keep)
        cost = 0, [(0, 0)] * 3
        return record("ring_attention", result.stored, edges, prepare=prepare, cost=lambda: cost, saved=saved)

    def _ring_forward(self, q: xp.Array, k: xp.Array, v: xp.Array, drop: Drop) -> tuple[xp.Array, xp.Array]:
        """Return (output, log of the sum of exponentials of each query).

        q: (batch, kv heads, query heads of each, T, size), as the output; k, v: (batch, kv heads, 1, T, size).
        """
        scale = q.shape[-1] ** -0.5
        o = track(xp.zeros(q.shape, q.dtype, q), "activation")
        m = xp.full(q.shape[:-1], -xp.inf, q.dtype, q)
        z = xp.zeros(q.shape[:-1], q.dtype, q)
        for owner, keys_here, values_here in self._round(k, v, "tensor_forward"):
            # At this step the K and V of rank `owner` are here; the next block is on its way.
            for rows, keys, diagonal in self._visible(owner):
                # (batch, kv heads, heads of each, own queries, owner's keys)
                scores = track(_scores(q[..., rows, :] * scale, keys_here[..., keys, :], diagonal), "workspace")

                # [1] The new maximum, and the factor by which what came before shrinks.
                new = xp.maximum(m[..., rows], scores.max(axis=-1))
                old = xp.exp(m[..., rows] - new)

                # [2] The sum of the exponentials, dropped weights included.
                scores -= new[..., None]
                xp.exp(scores, out=scores)
                z[..., rows] = z[..., rows] * old + scores.sum(axis=-1)

                # [3] The output, without the dropped weights.
                scores = self._dropped(scores, drop, rows, owner, keys)
                o[..., rows, :] = o[..., rows, :] * old[..., None] + scores @ values_here[..., keys, :]
                m[..., rows] = new
                _count("forward", 2, scores, q.shape[-1], diagonal)

        # Every query has met every key that it sees: its own chunk at least, so z is not zero.
        o /= z[..., None]
        return o, m + xp.log(z)

    def _ring_backward(
        self, q: xp.Array, k: xp.Array, v: xp.Array, g: xp.Array, o: xp.Array, log_sum: xp.Array, drop: Drop
    ) -> tuple[xp.Array, xp.Array, xp.Array]:
        """Return the gradients of q, and of this rank's own k and v; g: of the output o.

        q, g, o: (batch, kv heads, query heads of each, T, size); k, v: (batch, kv heads, 1, T, size).
        """
        scale = q.shape[-1] ** -0.5
        delta = (g * o).sum(axis=-1, keepdims=True)  # D_i of the softmax's backward: sum_j p_ij dp_ij
        dq = track(xp.zeros(q.shape, q.dtype, q), "activation_gradient")
        travelling: xp.Array | None = None  # gradients of K and V so far, which follow their block round
        for owner, keys_here, values_here in self._round(k, v, "tensor_backward"):
            # This rank's part of the block's gradients; what other ranks have added so far arrives meanwhile.
            block = track(xp.zeros((2, *k.shape[:-2], self.rows[owner], k.shape[-1]), q.dtype, q), "communication")
            arriving = None if travelling is None else self._pass_on(travelling, block.shape, "tensor_backward")
            for rows, keys, diagonal in self._visible(owner):
                # p: this block's probabilities again, exp(score - log of the sum).
                scaled = q[..., rows, :] * scale
                p = track(_scores(scaled, keys_here[..., keys, :], diagonal), "workspace")
                p -= log_sum[..., rows, None]
                xp.exp(p, out=p)
                # dV = P^T dO;  dS = P (dP - D);  dQ = dS K;  dK = dS^T Q
                do = g[..., rows, :]
                used = self._dropped(p, drop, rows, owner, keys)
                block[1][..., keys, :] += (xp.swapaxes(used, -1, -2) @ do).sum(axis=-3, keepdims=True)
                dp = track(do @ xp.swapaxes(values_here[..., keys, :], -1, -2), "workspace")
                dp = self._dropped(dp, drop, rows, owner, keys)
                p *= dp - delta[..., rows, :]
                dq[..., rows, :] += p @ keys_here[..., keys, :] * scale
                block[0][..., keys, :] += (xp.swapaxes(p, -1, -2) @ scaled).sum(axis=-3, keepdims=True)
                _count("input_gradient", 5, p, q.shape[-1], diagonal)

            # Add what the ranks before have computed; the sum goes on with the block.
            if arriving is not None:
                block = xp.upcast(self._arrived(arriving, "tensor_backward")) + block
            travelling = xp.downcast(block, k.dtype)

        # The last hop: the block that this rank saw last belongs to its neighbour.
        assert travelling is not None
        if self.comm.size > 1:
            arriving = self._pass_on(travelling, (2, *k.shape), "tensor_backward")
            travelling = self._arrived(arriving, "tensor_backward")
        dk, dv = travelling
        return dq, dk, dv

    def _dropped(self, weights: xp.Array, drop: Drop, rows: slice, owner: int, keys: slice) -> xp.Array:
        """Return a block of weights (own query rows, `owner`'s key rows) without the dropped ones."""
        if drop is None:
            return weights
        return drop(weights, rows, zigzag_positions(self.length, owner, self.comm.size)[keys])

    def _visible(self, owner: int) -> list[tuple[slice, slice, bool]]:
        """Return (own query rows, owner's key rows, is it a diagonal block) of the chunk pairs with work."""
        return [
            (rows, keys, query_chunk == key_chunk)
            for rows, query_chunk in self.spans[self.comm.rank]
            for keys, key_chunk in self.spans[owner]
            if query_chunk >= key_chunk and rows.stop > rows.start and keys.stop > keys.start
        ]

    def _round(self, k: xp.Array, v: xp.Array, why: str) -> Any:
        """Yield (owner, its k, its v) per rank, this one's first; the next block travels while the caller computes."""
        n, rank, block = self.comm.size, self.comm.rank, track(xp.stack([k, v]), "communication")
        for step in range(n):
            # After `step` hops the block of the rank `step` places back has come here.
            owner, arriving = (rank - step) % n, None
            if step < n - 1:
                shape = (*block.shape[:-2], self.rows[(owner - 1) % n], block.shape[-1])
                arriving = self._pass_on(block, shape, why)

            # The caller computes with this block while the next one travels; that time passes before the wait.
            yield owner, *xp.upcast(block)
            if arriving is not None:
                block = self._arrived(arriving, why)

    def _pass_on(self, block: xp.Array, shape: tuple[int, ...], why: str) -> tuple[list[Any], xp.Array]:
        """Start to send a block on and to receive the previous rank's, of this shape: (requests, where to)."""
        comm = self.comm
        incoming = track(xp.empty(shape, block.dtype, block), "communication")
        with purpose(why):
            requests = [
                comm.irecv(incoming, (comm.rank - 1) % comm.size),
                comm.isend(block, (comm.rank + 1) % comm.size),
            ]
        return requests, incoming

    def _arrived(self, arriving: tuple[list[Any], xp.Array], why: str) -> xp.Array:
        requests, incoming = arriving
        self.comm.advance_clock(why)
        self.comm.waitall(requests)
        return incoming


def _count(kind: str, products: int, scores: xp.Array, size: int, diagonal: bool) -> None:
    """Count `products` products of a block of scores with vectors of `size`; a diagonal block needs half."""
    for watcher in watchers.get():
        watcher.counted(kind, products * 2 * scores.size * size // (2 if diagonal else 1), 2 * scores.nbytes)


def _scores(scaled_q: xp.Array, k: xp.Array, diagonal: bool) -> xp.Array:
    scores = scaled_q @ xp.swapaxes(k, -1, -2)
    if diagonal and not xp.is_meta(scores):
        # Inside a chunk a query sees the keys up to its own place. Other visible chunks are seen whole.
        places = xp.device_arange(scores.shape[-1])
        scores[..., places[:, None] < places] = -xp.inf
    return scores


def _grouped(x: xp.Array, kv_heads: int) -> xp.Array:
    """Return (batch, T, heads, n) as (batch, kv heads, heads of each, T, n), contiguous."""
    batch, rows, heads, size = x.shape
    return contiguous(x.reshape(batch, rows, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4))


def _ungrouped(x: xp.Array) -> xp.Array:
    """Do the inverse of `_grouped`."""
    batch, kv_heads, shared, rows, size = x.shape
    return contiguous(x.transpose(0, 3, 1, 2, 4).reshape(batch, rows, kv_heads * shared, size))
