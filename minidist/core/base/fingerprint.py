"""Fingerprints: short hashes that ranks exchange to learn whether they hold the same model, plan or weights.

Two different inputs have the same fingerprint with probability 2^-128 (16 bytes) or 2^-64 (8 bytes).

Proved by: tests/base/test_fingerprint.py
"""

import hashlib

import numpy as np


def fingerprint(data: bytes | str, size: int = 16) -> np.ndarray:
    """Return `size` bytes, as a new array that can be sent, which are equal where the data are equal."""
    raw = data.encode() if isinstance(data, str) else data
    return np.frombuffer(hashlib.blake2b(raw, digest_size=size).digest(), np.uint8).copy()


def fingerprint_number(data: bytes | str, dtype: type[np.signedinteger] | type[np.unsignedinteger] = np.uint64) -> int:
    """Return a fingerprint of 8 bytes as one number, for a table of numbers: uint64, or int64."""
    return int(fingerprint(data, 8).view(dtype)[0])
