"""Ulysses x ring: heads are exchanged among neighbours, keys and values go round between the groups of neighbours.

    P = 4, U = 2     ranks 0 1 | ranks 2 3        all-to-all inside a group: its tokens with half of the heads each
                     rings: 0 - 2 and 1 - 3       a ring of the ranks with the same heads

Ulysses needs as many heads as ranks, and a ring's hops grow with the ranks. On a mesh of R x U ranks Ulysses takes U of
them, on fast links and at most as many as (key-value) heads, and rings of R = P / U the others. A group holds what a
rank of a ring of R holds, in zig-zag, and its members consecutive parts of that.

A rank sends what Ulysses on U ranks sends for 1/R of the tokens, and what a ring of R sends for 1/U of the heads.
This module combines DeepSpeed-Ulysses (ulysses.py) and ring attention (core/parallel/context_parallel.py).
Source: Fang and Zhao, "USP: A unified sequence parallelism approach", arXiv:2405.07719.

Proved by: tests/parallel/test_ulysses_ring.py
"""

from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.comm import Comm, init_device_mesh
from minidist.core.nn.module import Module
from minidist.core.parallel.context_parallel import RingAttention
from minidist.parallel.context.orders import sequence_positions
from minidist.parallel.context.ulysses import UlyssesAttention


class UlyssesRingAttention(Module):
    """Causal attention over `length` tokens, split over groups of `ulysses` neighbours of `comm` and over rings.

    A rank holds the tokens `sequence_positions(length, rank, ranks, f"zigzag/{ulysses}")`. Called as
    `RingAttention` is, by GPT and by Llama. Raises UsageError when `ulysses` does not divide the ranks.
    """

    def __init__(self, comm: Comm, length: int, ulysses: int) -> None:
        if ulysses < 1 or comm.size % ulysses:
            raise UsageError(
                f"ulysses={quoted(ulysses)} does not divide the {comm.size} context-parallel ranks; use a divisor of"
                f" {comm.size}"
            )
        self.sequence_comm, self.length, self.ulysses = comm, length, ulysses
        mesh = init_device_mesh(comm, (comm.size // ulysses, ulysses), ("ring", "heads"))
        # Inside Ulysses a rank has all tokens of its group, which are those of one rank of the ring.
        ring = RingAttention(mesh["ring"], length)
        self.exchange = UlyssesAttention(mesh["heads"], ring.rows[mesh["ring"].rank], ring)

    def positions(self) -> xp.Array:
        """Return the global positions of this rank's tokens."""
        comm = self.sequence_comm
        return sequence_positions(self.length, comm.rank, comm.size, f"zigzag/{self.ulysses}")

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """(qkv, heads) -> (batch, T_local, D), or (q, k, v) -> (batch, T_local, heads, n)."""
        mixed: Tensor = self.exchange(x, *rest)
        return mixed
