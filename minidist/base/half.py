"""Half precision: memory and messages hold float16 or bfloat16, arithmetic is done in float32.

    float16    1 sign  5 exponent  10 fraction     6e-8 .. 65504, 3 digits: range is what training runs out of
    bfloat16   1 sign  8 exponent   7 fraction    9e-41 .. 3e38, 2 digits: the range of float32, half of its bytes

A processor without 16-bit arithmetic multiplies float16 matrices 180 times slower than float32 ones, and a product of
two needs float32 sums anyway (Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.3). So a node
*upcasts* what it reads into a float32 workspace, computes, and *downcasts* what it leaves behind; the workspace is
freed when the node is done.

Proved by: tests/base/test_half.py
"""

from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.arrays import named_dtype as named_dtype
from minidist.core.base.arrays import is_half as is_half
from minidist.core.base.trace import track

DTYPES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}  # by the words of --precision
_BLOCK = 16 * 1024  # elements; a conversion's arrays stay in the cache
_SMALL = 2048  # elements; up to here one call of NumPy's conversion is faster than several that move bits


def is_floating(dtype: Any) -> bool:
    """Whether it is a real float, bfloat16 among them: such arrays have gradients."""
    return dtype.kind == "f" or is_half(dtype)


def widened(array: xp.Array) -> xp.Array:
    """Return the exact values of a 16-bit array in a new float32 array (memory purpose workspace): `arrays.upcast`."""
    return track(_to_float32(array), "workspace")


def rounded(array: xp.Array, dtype: Any) -> xp.Array:
    """Return the values, of another dtype, in a new array: `arrays.downcast`."""
    if xp.is_meta(array):
        # `_to_float16` returns a view in C order.
        float16 = dtype == np.float16 and array.dtype == np.float32
        return xp.empty(array.shape, dtype, array).view() if float16 else array.astype(dtype)
    if dtype == np.float16 and array.dtype == np.float32 and type(array) is np.ndarray:
        return _to_float16(np.asarray(array, order="C"))
    with xp.quiet_overflow():
        return array.astype(dtype)


def add_into(total: xp.Array, contribution: xp.Array) -> xp.Array:
    """total += contribution for 16-bit arrays: each sum is rounded once, as with the arrays' own `+=`, but faster."""
    if type(total) is not np.ndarray or not (total.flags.c_contiguous and contribution.flags.c_contiguous):
        total += contribution
        return total
    whole, total, contribution = total, total.reshape(-1), contribution.reshape(-1)
    with xp.quiet_overflow():
        for start in range(0, total.size, _BLOCK):
            part = total[start : start + _BLOCK]
            sums = _to_float32(part)
            sums += _to_float32(contribution[start : start + _BLOCK])
            part[...] = xp.downcast(sums, total.dtype)
    return whole


def all_finite(array: xp.Array) -> bool:
    """Whether no element is infinite or NaN. Of 16-bit floats only the exponent's bits are examined."""
    if array.size == 0:
        return True
    if type(array) is np.ndarray and is_half(array.dtype):
        infinity = 0x7C00 if array.dtype == np.float16 else 0x7F80
        return bool((array.view(np.uint16) & 0x7FFF).max() < infinity)
    return bool(xp.isfinite(array).all())


def _to_float32(array: xp.Array) -> xp.Array:
    """NumPy's own conversion of float16 goes element by element; shifting all bits into place is 7 times as fast."""
    if type(array) is not np.ndarray or array.dtype != np.float16 or array.size <= _SMALL:
        return array.astype(np.float32)
    bits = array.view(np.int16).astype(np.int32, order="C")  # the sign is repeated on the left
    if bits.size and (bits & 0x7C00).max() == 0x7C00:
        return array.astype(np.float32)  # an infinity or a NaN
    bits <<= 13
    bits &= -0x70002000  # sign, exponent and fraction where float32 has them; the exponents count from another number
    result = bits.view(np.float32)
    result *= np.float32(2.0**112)
    return result


def _to_float16(array: xp.Array) -> xp.Array:
    """float32 to float16. NumPy takes 1.5 ns per element, but 7 for a subnormal result, as in small gradients."""
    flat = array.reshape(-1)
    out = np.empty(flat.shape, np.uint16)
    with xp.quiet_overflow():
        for start in range(0, flat.size, _BLOCK):
            _block_to_float16(flat[start : start + _BLOCK], out[start : start + _BLOCK])
    return out.view(np.float16).reshape(array.shape)


def _block_to_float16(x: xp.Array, out: xp.Array) -> None:
    """Adding a power of two 2^13 above the last digit wanted lets float32's own addition round; then the bits are
    moved.
    """
    word = x.view(np.uint32)
    magnitude = np.absolute(x)
    magnitude *= np.float32(2.0**112)  # what float16 cannot hold becomes infinite here
    magnitude *= np.float32(2.0**-110)
    power = word + word  # the exponent, without the sign
    power &= np.uint32(0xFF000000)
    np.maximum(power, np.uint32(0x71000000), out=power)  # below 2^-14 the last digit stays that of the subnormals
    power >>= np.uint32(1)
    power += np.uint32(0x07800000)
    magnitude += power.view(np.float32)
    bits = magnitude.view(np.uint32)
    np.right_shift(bits, 13, out=power)
    power &= np.uint32(0x7C00)
    bits &= np.uint32(0x0FFF)
    bits += power
    np.right_shift(word, 16, out=power)
    power &= np.uint32(0x8000)
    bits |= power
    np.copyto(out, bits, casting="unsafe")
    lost = x != x
    if lost.any():
        out[lost] = (word[lost] >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7E00)
