"""Ulysses: outside attention a rank has some tokens and all heads, inside it has all tokens and some heads.

    tokens \\ heads   before: rank = row       after the all-to-all: rank = column
                     | 0 0 0 0 |              | 0 1 2 3 |
                     | 1 1 1 1 |              | 0 1 2 3 |
                     | 2 2 2 2 |              | 0 1 2 3 |
                     | 3 3 3 3 |              | 0 1 2 3 |

Heads do not interact, so between two all-to-alls attention is the one-device function. Each rank sends
4 N h / P (P-1)/P numbers in forward (q, k, v in, the output out), whatever P; a ring sends 2 N h (P-1)/P. No more ranks
than (key-value) heads. Tokens are contiguous (`sequence_positions(..., "contiguous")`).

Source: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.

Proved by: tests/parallel/test_context.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minidist.base.errors import check_divisible
from minidist.core.autograd import Tensor, causal_attention, reshape
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_to_all
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor_parallel import contiguous
from minidist.nn import Function, concatenate
from minidist.nn.dropout import AttentionDropout
from minidist.nn.ops.dropout import WeightDropout
from minidist.nn.ops.grouped_attention import grouped_query_attention
from minidist.parallel.context.orders import sequence_positions


class UlyssesAttention(Module):
    """Causal attention over `length` tokens; each rank holds a contiguous part, for heads split over `comm`.

    Called with (qkv, heads) it is an `attention_fn` for GPT, with (q, k, v) one for Llama, as `RingAttention`; the
    last argument may be the dropout of the weights. attention_fn: the attention of a rank's heads over all tokens,
    called in the same form.
    """

    def __init__(self, comm: Comm, length: int, attention_fn: Callable[..., Tensor] | None = None) -> None:
        check_communicator(comm, "UlyssesAttention")
        self.comm = self.sequence_comm = comm
        self.length = hooks.check_whole("length", length)
        # Between the two exchanges: what is given, or the one-device function of the form in which it is called.
        self.packed_fn = attention_fn or causal_attention
        self.grouped_fn = attention_fn or grouped_query_attention

    def positions(self) -> xp.Array:
        """Return the global positions of this rank's tokens."""
        return sequence_positions(self.length, self.comm.rank, self.comm.size, "contiguous")

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """(qkv, heads) -> (batch, T_local, D), or (q, k, v) -> (batch, T_local, heads, n)."""
        if isinstance(rest[0], int):
            heads, *dropout = rest
            batch, rows, width = x.shape
            # GPT packs Q, K and V: each is exchanged by itself, so that a rank gets whole heads, then packed again.
            size = width // (3 * heads)
            split = reshape(x, (batch, rows, 3, heads, size))
            q, k, v = (self.to_heads(split[:, :, part]) for part in range(3))
            own = q.shape[2]
            packed = concatenate([reshape(x, (batch, self.length, own * size)) for x in (q, k, v)], axis=2)
            # Ordinary attention: all tokens (batch, T, own heads, n), and no message inside.
            mixed = reshape(
                self.packed_fn(packed, own, *self._own_heads(dropout, own)), (batch, self.length, own, size)
            )
            return reshape(self.to_tokens(mixed), (batch, rows, width // 3))

        # Llama passes them apart, perhaps with fewer key-value heads.
        k, v, *dropout = rest
        q, k, v = (self.to_heads(tensor) for tensor in (x, k, v))
        return self.to_tokens(self.grouped_fn(q, k, v, *self._own_heads(dropout, q.shape[2])))

    def _own_heads(self, dropout: list[WeightDropout], own: int) -> list[WeightDropout]:
        return [_SomeHeads(each, self.comm.rank * own) for each in dropout]

    def to_heads(self, x: Tensor) -> Tensor:
        """(batch, own tokens, heads, n) -> (batch, all tokens, own heads, n); backward does `to_tokens`."""
        check_divisible(x.shape[2], "(key-value) heads", self.comm.size, "context", or_else="ring attention")
        # The heads must divide; the tokens need not.
        return x if self.comm.size == 1 else _Swap.apply(x, self.comm, self.length, True)

    def to_tokens(self, x: Tensor) -> Tensor:
        """(batch, all tokens, own heads, n) -> (batch, own tokens, heads, n); backward does `to_heads`."""
        return x if self.comm.size == 1 else _Swap.apply(x, self.comm, self.length, False)


@dataclass
class _SomeHeads:
    """The dropout of the weights of the heads from `first` on."""

    whole: WeightDropout
    first: int
    of_queries = AttentionDropout.of_queries

    @property
    def scale(self) -> float:
        return self.whole.scale

    def mask(self, samples: int, heads: int, length: int, first: int = 0) -> xp.Array:
        # By the global number of the head, so that masks are those of one device.
        return self.whole.mask(samples, heads, length, self.first + first)


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, x: xp.Array, comm: Comm, length: int, to_heads: bool) -> xp.Array:
        ctx.settings = comm, length, to_heads
        return _swap(x, comm, length, to_heads, "tensor_forward")

    @staticmethod
    def backward(ctx: Any, grad: xp.Array) -> xp.Array:
        comm, length, to_heads = ctx.settings
        return _swap(grad, comm, length, not to_heads, "tensor_backward")


def _swap(x: xp.Array, comm: Comm, length: int, to_heads: bool, why: str) -> xp.Array:
    """Exchange tokens for heads, or back, by one all-to-all of slabs (batch, a rank's tokens, a rank's heads, n)."""
    batch, _, heads, size = x.shape
    tokens = chunk_sizes(length, comm.size)
    own = tokens[comm.rank]
    starts = offsets(tokens)

    # pieces[j] goes to rank j; shapes[j] is the slab that comes from it.
    if to_heads:
        mine = heads // comm.size
        pieces = [x[:, :, j * mine : (j + 1) * mine] for j in range(comm.size)]
        shapes = [(batch, n, mine, size) for n in tokens]
    else:
        mine = heads
        pieces = [x[:, starts[j] : starts[j + 1]] for j in range(comm.size)]
        shapes = [(batch, own, mine, size)] * comm.size

    # One message to each rank.
    flat = xp.concatenate([contiguous(piece).reshape(-1) for piece in pieces])
    counts = [batch * shape[1] * mine * size for shape in shapes]
    comm.advance_clock(why)
    with purpose(why):
        received = all_to_all(comm, flat, send_counts=[piece.size for piece in pieces], receive_counts=counts)

    # Tokens are joined along dim 1 (rank j's come after rank j-1's), heads along dim 2.
    ends = offsets(counts)
    slabs = [received[ends[j] : ends[j + 1]].reshape(shapes[j]) for j in range(comm.size)]
    return xp.concatenate(slabs, axis=1 if to_heads else 2)
