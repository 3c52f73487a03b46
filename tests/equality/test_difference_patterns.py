"""Each pattern is found in what it describes, with rounding, and no pattern in anything else."""

import numpy as np

from minidist.job.equality.difference_patterns import Context, explain
from tests.cases import each

DRAW = np.random.default_rng(5)
ROWS = [DRAW.standard_normal((12, 8)) for _ in range(4)]
OURS = sum(ROWS)
CONTEXT = Context(1e-5, {"dp": 4, "tp": 2}, ROWS, before=DRAW.standard_normal((12, 8)), heads=3)
SHARD = np.concatenate([np.zeros((12, 2)), OURS[:, 2:4], np.zeros((12, 4))], axis=1)

CASES = [
    (4 * OURS, "4 times (dp has 4 ranks) ours"),
    (OURS / 2, "1/2 of (tp has 2 ranks) ours"),
    (8 * OURS, "8 times ours"),
    (-OURS, "minus 1 times ours"),
    (1.37 * OURS, "1.37 times ours"),
    (ROWS[2], "the gradient of rows 2 of 4; rows 0-1, 3 are missing"),
    (4 * (ROWS[0] + ROWS[1]), "4 times (dp has 4 ranks) the gradient of rows 0-1 of 4; rows 2-3 are missing"),
    (OURS + ROWS[3], "rows of the batch count differently: 1, 1, 1, 2 times"),
    (CONTEXT.before, "our gradient of the batch before: stale by one step"),
    (SHARD, "ours in 2:4 of dim 1 (of 8), zeros elsewhere: one shard only"),
    (OURS.T, "ours, transposed"),
    (OURS.reshape(3, 4, 8)[[1, 2, 0]].reshape(12, 8), "ours with the heads in the order 1, 2, 0"),
    (OURS.reshape(3, 2, 2, 8)[:, ::-1].reshape(12, 8), "ours with the halves of each head swapped"),
    (np.zeros((12, 8)), "all zeros"),
    (
        np.where(OURS > 2, np.nan, OURS),
        f"not finite: the element at {np.argwhere(OURS > 2)[0].tolist()} is nan, ours is {OURS[OURS > 2][0]};"
        f" {int((OURS > 2).sum())} of 96 elements are not finite",
    ),
    (OURS[:5], "of shape (5, 8), and ours is (12, 8)"),
]


@each(("theirs", "sentence"), CASES)
def test_a_pattern_is_found_in_spite_of_rounding(theirs, sentence):
    rounded = theirs.astype(np.float32).astype(np.float64)
    assert explain(rounded, OURS, CONTEXT) == [sentence]


def test_noise_has_no_pattern():
    for _ in range(20):
        (sentence,) = explain(OURS + 0.01 * DRAW.standard_normal(OURS.shape), OURS, CONTEXT)
        assert sentence.startswith("no known pattern: relative distance 0.0")


def test_rows_that_are_alike_are_not_told_apart():
    """Of equal rows no fit can say which one counts how often."""
    rows = [ROWS[0], ROWS[0], ROWS[1]]
    sentences = explain(3 * ROWS[0] + ROWS[1], 2 * ROWS[0] + ROWS[1], Context(1e-5, {}, rows))
    assert all("rows" not in sentence for sentence in sentences)


def test_a_tensor_without_the_dim_of_heads_has_no_order_of_heads():
    for shape, axis in (((), 0), ((), -1), ((12,), 1)):
        ours = np.ones(shape)
        assert explain(3 * ours, ours, Context(1e-5, heads=3, axis=axis)) == ["3 times ours"]
