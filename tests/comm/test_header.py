"""Headers: what is packed is unpacked, and what differs in operation, dtype or shape differs in its 64 bytes."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from minidist.comm.header import (
    EQUAL_BYTES,
    HEADER_BYTES,
    KEY_BYTES,
    NO_CALLS,
    NO_CHECKSUM,
    Header,
    checksum_bytes,
    compare,
    has_checksum,
    header_of,
    is_payload,
    pack,
    unpack,
)
from minidist.core.base.errors import MismatchError
from tests.cases import each


@each("shape", [(), (0,), (3,), (2, 3), (1, 2, 3, 4, 5), (2**31,)])
def test_what_is_packed_comes_back(shape):
    header = Header("all_reduce/ordered", "bfloat16", 2 * int(np.prod(shape)), shape)
    assert len(pack(header) + NO_CALLS + NO_CHECKSUM) == HEADER_BYTES
    assert unpack(pack(header)) == header


def test_headers_that_differ_stay_different():
    operations = ["message", "reduce_scatter/recursive_halving", "reduce_scatter/recursive_doubling"]
    dtypes = [np.dtype(d) for d in ("f4", "f8", "c8", "c16", ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, "m8[s]")]
    shapes = [
        (),
        (1,),
        (1, 1),
        (6,),
        (2, 3),
        (3, 2),
        (1, 2, 3, 4, 5, 6),
        (2, 1, 3, 4, 5, 6, 7),
        (2, 1, 3, 4, 5, 7, 6),
        (0,),
        (0, 2),
    ]
    headers = [
        header_of(operation, np.empty(shape, dtype))
        for operation, dtype, shape in itertools.product(operations, dtypes, shapes)
    ]
    assert len({pack(header) for header in headers}) == len(headers)


@each("algorithm", ["ring", "recursive_halving", "a_very_long_name_of_an_algorithm"])
@each(
    ("sent", "expected", "words"),
    [
        (" [2, 3]", " [3, 2]", "^shape mismatch: .*an array of the same shape"),
        ("", " [3, 2]", "^(shape mismatch: .*an array of|argument mismatch)"),
        (" max", "", "^(reduction mismatch: .*the same reduction|argument mismatch)"),
        (" max", " min", "^reduction mismatch: .*the same reduction"),
        (" root 0", " root 1", "^roots differ: .*the same root"),
        (" root 12 [300, 4000]", " root 13 [300, 4000]", "^(roots differ|argument mismatch)"),
        (" max root 1 [2, 3]", " max root 1 [3, 2]", "^(shape mismatch|argument mismatch)"),
        (" sync", " ssp:3 of 7 keys", "^argument mismatch: .*with the same arguments"),
    ],
)
@each("packed", [False, True])
def test_arguments_that_differ_are_not_called_another_operation(algorithm, sent, expected, words, packed):
    """Also when 24 bytes are too few for the operation and its arguments; in the simulated world nothing is cut."""
    names = [f"reduce_scatter/{algorithm}{arguments}" for arguments in (sent, expected)]
    headers = [Header(name, "float64", 24, (3,)) for name in names]
    if packed:
        headers = [unpack(pack(header)) for header in headers]
    elif "|" in words:
        words = words.replace("|argument mismatch", "")
    with pytest.raises(MismatchError, match=words) as caught:
        compare(*headers, 0, 1, "here.py:1", names[1] if packed else "")
    assert names[1] in str(caught.value)
    assert f"rank 0 sent reduce_scatter/{algorithm}" in str(caught.value)
    if packed:
        other = unpack(pack(Header("all_gather/ring", "float64", 24, (3,))))
        with pytest.raises(MismatchError, match=r"^operation mismatch: rank 0 sent all_gather/ring"):
            compare(other, headers[1], 0, 1, "here.py:1", names[1])


@pytest.mark.parametrize("algorithm", ["ring", "recursive_halving"])
@pytest.mark.parametrize("packed", [False, True])
def test_replicas_that_differ_say_what_they_are(algorithm, packed):
    """Under MPI the sender's text comes shortened; the receiver compares it with the receiver's text."""
    texts = ["model 1 after 3 updates with lr 0.1", "model 1 after 3 updates with lr 0.2", "model 2 after 0 updates"]
    for sent, expected in [(0, 1), (1, 0), (0, 2)]:
        names = [f"all_reduce/{algorithm} avg {texts[i]}" for i in (sent, expected)]
        headers = [Header(name, "float64", 24, (3,)) for name in names]
        if packed:
            headers = [unpack(pack(header)) for header in headers]
        theirs = "something else" if packed else texts[sent]
        words = (
            f"^ranks differ in all_reduce/{algorithm}: rank 1 has {texts[expected]}, and rank 0 {theirs}, at here.py:1;"
        )
        with pytest.raises(MismatchError, match=words):
            compare(*headers, 0, 1, "here.py:1", names[1])
    headers = [Header(f"all_reduce/ring{op} {texts[0]}", "float64", 24, (3,)) for op in (" avg", "")]
    with pytest.raises(MismatchError, match=r"^argument mismatch: .*same arguments"):
        compare(*headers, 0, 1, "here.py:1")


@pytest.mark.parametrize("checksum", [0, 1, 2**32 - 1])
def test_a_header_may_have_the_checksum_of_its_payload(checksum):
    packed = pack(Header("message", "float32", 2**40, (2**20, 2**18)))
    plain, signed = packed + b"ab" + NO_CHECKSUM, packed + b"ab" + checksum_bytes(checksum)
    assert len(packed) == KEY_BYTES
    assert not has_checksum(plain)
    assert is_payload(plain, 17)
    assert has_checksum(signed)
    assert is_payload(bytearray(signed), checksum)
    assert not is_payload(signed, 17)
    assert signed[:EQUAL_BYTES] == plain[:EQUAL_BYTES]
    assert unpack(signed) == unpack(plain) == Header("message", "float32", 2**40, (2**20, 2**18))


def test_a_mismatch_names_both_sides():
    sent, expected = Header("message", "float32", 8, (2,)), Header("message", "float64", 8, (1,))
    with pytest.raises(
        MismatchError, match=r"dtype mismatch: rank 3 sent message of float32\[2\] \(8 B\), rank 4 expected"
    ):
        compare(sent, expected, 3, 4, "here.py:1")
    compare(sent, sent, 3, 4, "here.py:1")
