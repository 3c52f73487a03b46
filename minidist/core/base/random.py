"""Random numbers that depend on *what* they are for, never on who draws them or in which order.

Each draw is a function of a key, hashed from (seed, purpose, step, qualified module name, call index), and of the place
of the element in the *global* array. So initial weights are the same numbers under every strategy and every number of
ranks. The generator is Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A fingerprint is such a hash of long data, which ranks exchange to learn whether they hold the same model, plan or
weights. Two different inputs have the same fingerprint with probability 2^-128 (16 bytes) or 2^-64 (8 bytes).

Proved by: tests/base/test_random.py, tests/base/test_fingerprint.py
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from minidist.core.base import arrays as xp
from minidist.core.base import hooks


def fingerprint(data: bytes | str, size: int = 16) -> np.ndarray:
    """Return `size` bytes, as a new array that can be sent, which are equal where the data are equal."""
    raw = data.encode() if isinstance(data, str) else data
    return np.frombuffer(hashlib.blake2b(raw, digest_size=size).digest(), np.uint8).copy()


def fingerprint_number(data: bytes | str, dtype: type[np.signedinteger] | type[np.unsignedinteger] = np.uint64) -> int:
    """Return a fingerprint of 8 bytes as one number, for a table of numbers: uint64, or int64."""
    return int(fingerprint(data, 8).view(dtype)[0])


@dataclass(frozen=True)
class Key(ISeedSequence):
    """What a stream of draws is for. Two keys that differ anywhere give independent streams.

    It is the seed of a Philox. `Philox(key=...)` takes 128 bits, too, but asks the operating system for entropy first.
    """

    seed: int
    purpose: str
    step: int = 0
    name: str = ""
    call: int = 0

    def generate_state(self, n_words: int = 2, dtype: Any = np.uint64) -> np.ndarray:
        """Return the 128-bit key of the generator, which is all that Philox asks for."""
        return fingerprint(repr((self.seed, self.purpose, self.step, self.name, self.call))).view(dtype)


def initial_weight(seed: int, name: str, shape: tuple[int, ...], law: str, scale: float) -> xp.Array:
    """The initial value, float64, of the parameter `name` of global `shape`; depends on nothing but the arguments.

    `law` is "normal" (standard deviation `scale`), "uniform" (in [-scale, scale)) or "constant" (all `scale`). A rank
    that holds a slice draws the whole and cuts.
    """
    device = xp.creating.get()
    if getattr(device, "is_meta", False):
        return xp.empty(shape, np.float64)  # nothing is drawn for a dry run
    # NumPy takes such a seed, and its annotation does not name it.
    key = Key(seed, "weight", name=name + repr(tuple(shape)))
    generator = np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]
    if law == "normal":
        values = generator.standard_normal(shape) * scale
    elif law == "uniform":
        values = (generator.random(shape) * 2 - 1) * scale
    else:
        if law != "constant":
            hooks.limits().refuse_law(law, name)
        values = np.full(shape, scale, dtype=np.float64)
    # Drawn on the host, so that a model has the same values on every device.
    return xp.to_device(values)
