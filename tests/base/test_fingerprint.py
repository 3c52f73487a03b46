"""Equal data have equal fingerprints on every platform, others have not."""

import numpy as np

from minidist.core.base.random import fingerprint, fingerprint_number


def test_equal_data_have_equal_fingerprints_and_others_have_not():
    assert np.array_equal(fingerprint("a plan"), fingerprint(b"a plan"))
    assert not np.array_equal(fingerprint("a plan"), fingerprint("a plan "))
    assert len({fingerprint(bytes([i])).tobytes() for i in range(256)}) == 256


def test_the_bytes_are_blake2b_and_belong_to_the_caller():
    mine = fingerprint("", 8)
    assert mine.tobytes().hex() == "e4a6a0577479b2b4"  # RFC 7693's reference implementation, 8 bytes, no input
    mine[0] = 0
    assert fingerprint("", 8)[0] == 0xE4


def test_a_number_is_the_eight_bytes_little_endian():
    assert fingerprint_number("") == 0xB4B2797457A0A6E4
    assert fingerprint_number("", np.int64) == 0xB4B2797457A0A6E4 - 2**64
