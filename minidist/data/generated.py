"""Data that need no download: English that every Python carries, images of digits, and a source whose entropy is known.

The numbers are functions of a seed (Philox), so every rank makes the same data and no rank sends any.

Proved by: tests/data/test_datasets.py
"""

from bisect import bisect_right
from math import log

import numpy as np

from minidist.base.coordinates import Key, uniform, uniform_rows
from minidist.base.limits import check_whole
from minidist.data.datasets import SampleDataset, TokenDataset

# The digits of the usual 5 x 7 dot-matrix font, one number per row, its five bits from left to right.
_FONT = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


def pydoc_text() -> TokenDataset:
    """Return the help texts of Python (`pydoc_data.topics`), several hundred kB of English, as bytes: vocabulary 256.

    The text differs between versions of Python.
    """
    from pydoc_data.topics import topics  # a large module: loaded when asked for

    text = "\n\n".join(f"{name}\n{topics[name]}" for name in sorted(topics))
    return TokenDataset("pydoc", np.frombuffer(text.encode(), np.uint8), 256)


def random_tokens(vocab_size: int, tokens: int = 2**20, seed: int = 0) -> TokenDataset:
    """Return tokens that are drawn independently and equally often, for the sizes of a model and not for learning."""
    draws = uniform(Key(seed, "random tokens"), 0, tokens)
    entropy = log(vocab_size)
    return TokenDataset(f"random:{vocab_size}", (draws * vocab_size).astype(np.uint32), vocab_size, entropy)


def glyphs(samples: int = 2000, size: int = 12, seed: int = 0) -> SampleDataset:
    """Return grey images of digits, (samples, size, size) float32, at random places, in random ink, with noise."""
    check_whole("samples", samples, 1)
    draws = uniform_rows(Key(seed, "glyphs"), 0, samples, (4 + size * size,))

    # Columns of the draws: the digit, its place, its ink, and a pixel of noise each.
    targets = (draws[:, 0] * 10).astype(np.int64)
    rows, columns = (draws[:, 1] * (size - 6)).astype(int), (draws[:, 2] * (size - 4)).astype(int)
    ink = 0.6 + 0.4 * draws[:, 3]
    # Each number's five bits become five pixels.
    font = (np.array(_FONT)[:, :, None] >> np.arange(4, -1, -1)) & 1  # (digit, 7, 5)

    # images: (samples, size, size). Noise everywhere, then the digit's ink at its place.
    images = 0.3 * draws[:, 4:].reshape(samples, size, size)
    for i in range(samples):
        images[i, rows[i] : rows[i] + 7, columns[i] : columns[i] + 5] += ink[i] * font[targets[i]]
    return SampleDataset("glyphs", images.astype(np.float32), targets, 10)


def markov(tokens: int = 100_000, vocab_size: int = 16, seed: int = 0) -> TokenDataset:
    """Return a chain of order 1 with random transitions: `.entropy` is the loss, in nats, that a perfect model reaches.

    The entropy rate is - sum_i pi_i sum_j P_ij ln P_ij with the stationary pi = pi P (Cover and Thomas, "Elements of
    information theory", theorem 4.2.4). The first token is drawn from pi.
    """
    # Row i: the probabilities of the tokens after i.
    weights = -np.log1p(-uniform_rows(Key(seed, "markov", name="transitions"), 0, vocab_size, (vocab_size,)))
    transitions = weights**3  # exponential, cubed: some transitions are much likelier than others
    transitions /= transitions.sum(axis=1, keepdims=True)

    # pi = pi P and sum pi = 1, solved together.
    equations = np.vstack([transitions.T - np.eye(vocab_size), np.ones(vocab_size)])
    stationary = np.linalg.lstsq(equations, np.append(np.zeros(vocab_size), 1.0), rcond=None)[0]

    # The entropy rate of the docstring: the mean entropy of a row, weighted by how often its token occurs.
    entropy = -sum(
        pi * p * log(p) for pi, row in zip(stationary.tolist(), transitions.tolist(), strict=True) for p in row if p > 0
    )

    # Each draw picks the next token by the cumulative row of the present one.
    cumulative = np.cumsum(transitions, axis=1).tolist()
    # The first token is drawn from pi, so the chain is stationary from the start.
    token = min(bisect_right(np.cumsum(stationary).tolist(), uniform(Key(seed, "markov"), 0, 1)[0]), vocab_size - 1)
    # One draw per token; the index of each draw is its place, so the chain is a function of the seed.
    chain = [token]
    for draw in uniform(Key(seed, "markov"), 1, tokens - 1).tolist():
        token = min(bisect_right(cumulative[token], draw), vocab_size - 1)
        chain.append(token)
    return TokenDataset("markov", np.array(chain, np.uint16), vocab_size, entropy)
