"""How many bytes of activations one transformer block keeps for its backward, in closed form, for two blocks.

Korthikanti et al., 2022 (section 4.1) count an unfused block: s positions, b samples, width h, a heads, values of i
bytes, masks of one:

    attention   its input, Q, K, V, and the input of the output projection      5 i s b h
                softmax, its dropped-out copy, and the mask between them         (2 i + 1) a s^2 b
    MLP         the inputs of both products, 1 and 4, and of GELU, 4             9 i s b h
    two norms   their inputs                                                     2 i s b h
    two masks                                                                    2 s b h

With i = 2 that is 34 s b h + 5 a s^2 b. The paper leaves out two numbers per row and norm (mean and deviation); ours
keeps one, in float32 for half precision. The fused block of `core/nn/gpt.py` keeps as many times s b h, but of the
scores only the part at or below the diagonal blocks of 64 queries, once, with one sum per query: about i a s^2 b / 2;
with dropout also a mask of all scores, a s^2 b bytes.

Proved by: tests/nn/test_recompute.py, tests/planning/test_zero_stages.py
"""

QUERIES = 64  # rows of a block of the fused attention


def unfused(s: int, b: int, h: int, a: int, itemsize: int = 2) -> int:
    """Return the paper's bytes: 34 s b h + 5 a s^2 b for itemsize 2."""
    return (16 * itemsize + 2) * s * b * h + (2 * itemsize + 1) * a * s * s * b


def fused(s: int, b: int, h: int, a: int, itemsize: int = 4, dropout: bool = False) -> int:
    """Return the bytes that `gpt.Block` keeps."""
    blocks = [(min(QUERIES, s - first), min(first + QUERIES, s)) for first in range(0, s, QUERIES)]  # (queries, keys)
    # A value for each score, and a sum, at least in float32, for each query.
    scores = sum(queries * (keys * itemsize + max(itemsize, 4)) for queries, keys in blocks)
    masks = 2 * s * b * h + a * s * s * b if dropout else 0
    return 16 * itemsize * s * b * h + 2 * max(itemsize, 4) * s * b + a * b * scores + masks
