"""What a model must beat: the entropy of a text, in nats, when only frequencies or only pairs are known.

A language model that has learned nothing has a loss of ln V; one that knows how often each byte occurs reaches the
unigram entropy; one that looks at the byte before, the bigram entropy. A loss below that proves that context is used.
Source: C. Shannon, "Prediction and entropy of printed English" (1951), F_1 and F_2.
Proved by: tests/data/test_datasets.py
"""

import numpy as np


def _entropy(counts: np.ndarray) -> float:
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _numbers(tokens: bytes | np.ndarray) -> np.ndarray:
    return np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)


def unigram_entropy(tokens: bytes | np.ndarray) -> float:
    """Return - sum p(a) ln p(a) over the tokens a that occur (F_1)."""
    return _entropy(np.unique(_numbers(tokens), return_counts=True)[1])


def bigram_entropy(tokens: bytes | np.ndarray) -> float:
    """Return - sum p(a, b) ln p(b | a) over the neighbours a, b that occur (F_2): of a token, given the one before."""
    # H(b | a) = H(a, b) - H(a). A pair is one number: a V + b.
    numbers = _numbers(tokens).astype(np.int64)
    before, after = numbers[:-1], numbers[1:]
    pairs = before * (int(numbers.max()) + 1) + after
    return _entropy(np.unique(pairs, return_counts=True)[1]) - _entropy(np.unique(before, return_counts=True)[1])
