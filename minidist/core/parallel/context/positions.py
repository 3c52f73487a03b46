"""The *global* positions of the tokens of a rank when the sequence is split, chosen so that all ranks do equal work.

    contiguous   | 0 0 | 1 1 | 2 2 | 3 3 |
    zig-zag      | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |

A causal query sees the keys before it, so with contiguous parts the last rank would compute P times what the first
does. With zig-zag parts rank r holds chunks r and 2P-1-r of 2P: the queries of one see few keys, those of the other
many, and all ranks do the same work. Whatever is indexed by position (position embeddings, rotary angles) must use
these numbers: starting from 0 on every rank is a known bug.

Source of the balance: Brandon et al., "Striped Attention", 2023; the chunk pairs are those of Llama 3 (2024, 3.3.2).

Proved by: tests/parallel/test_context.py, tests/parallel/test_all_gather_attention.py
"""

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes, offsets


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
    if ranks > length:
        raise UsageError(
            f"a sequence of {length} tokens over {ranks} context-parallel ranks leaves ranks without any; use at most "
            f"{length} ranks, or at least {ranks} tokens"
        )
    return xp.concatenate([xp.device_arange(start, end) for start, end in chunks_of(length, rank, ranks)])
