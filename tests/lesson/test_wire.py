"""What an answer sends to its judge: plain values come out as they went in, and nothing else comes out."""

import contextlib
import os
import pickle
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.plain_pickle import BadPickleError
from minidist.course.lesson.plain import Unreadable
from minidist.course.lesson.wire import MAX_FRAME, Channel, pack, unpack
from tests.cases import each

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=4)
    | st.floats()
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values_come_out_as_they_went_in(value):
    assert repr(unpack(pack(value))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.zeros((0, 3), np.float32),
        np.array(True),
        np.array(["a", "bc"]),
        np.array(b"x"),
    ],
)
def test_arrays_keep_dtype_shape_and_bits(value):
    got = unpack(pack([value]))[0]
    assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert got.flags.writeable


def test_numbers_of_numpy_complex_ones_and_what_could_not_be_read_come_out():
    values = [np.float32(0.1), np.int64(-3), np.bool_(True), 1 - 2j, Unreadable("a set (...)")]
    assert repr(unpack(pack(values))) == repr(values)


def test_what_is_one_object_is_one_object_again():
    array, values = np.ones(2), [1]
    got = unpack(pack([array, array, values, values, np.ones(2)]))
    assert got[0] is got[1]
    assert got[2] is got[3]
    assert got[4] is not got[0]


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


def stand_in(*parts):
    """A pickle of a stand-in that `pack` would not write."""
    content = pickle.dumps(parts, 4)
    return content[:-1] + b"Q."


@each(
    "content",
    [
        b"",
        b"junk",
        pickle.dumps(Evil(), 4),
        pickle.dumps(Evil(), 0),
        pickle.dumps(np.ones(3), 4),
        pickle.dumps(3, 4)[:-1],
        b"\x80\x04r\xff\xff\xff\x7f.",
        stand_in("ndarray", 0, "<f8", (1 << 40,), b""),
        stand_in("ndarray", 0, "<f8", (2,), bytes(8)),
        stand_in("ndarray", 0, "O", (1,), bytes(8)),
        stand_in("ndarray", 0, "U0", (1 << 40,), b""),
        stand_in("ndarray", 0, "<f8", (-1, -1), bytes(8)),
        stand_in("generic", 0, "<f8", b""),
        stand_in("again", 7),
        stand_in("__import__", 0, "os"),
    ],
)
def test_anything_else_is_refused_and_runs_nothing(content):
    with pytest.raises(BadPickleError):
        unpack(content)


@given(st.data())
def test_damaged_bytes_are_a_value_or_refused(data):
    content = bytearray(pack([np.arange(3.0), {"a": (1, 2.5)}, "text", 1j, [np.float64(2)] * 2]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    with contextlib.suppress(BadPickleError):
        unpack(bytes(content))


def channels():
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_frames_arrive_whole_and_in_order():
    one, other = channels()
    frames = [b"", b"a", bytes(3_000_000), b"b" * 9]
    thread = threading.Thread(target=lambda: [one.send(frame) for frame in frames])
    thread.start()
    assert [other.receive() for _ in frames] == frames
    thread.join()


def test_a_frame_that_does_not_come_ends_at_its_time_and_one_of_a_closed_channel_at_once():
    one, other = channels()
    one.socket.sendall((100).to_bytes(8, "little") + b"half")
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        other.receive(begun + 0.1)
    one.socket.close()
    with pytest.raises(EOFError):
        other.receive(begun + 60)
    assert time.monotonic() - begun < 30


def test_a_frame_ends_when_nobody_waits_for_it_any_more():
    _one, other = channels()
    mine, theirs = socket.socketpair()
    mine.close()
    with pytest.raises(EOFError):
        other.receive(time.monotonic() + 60, [theirs])


def test_a_frame_that_is_too_long_is_refused_before_it_is_read():
    one, other = channels()
    one.socket.sendall((MAX_FRAME + 1).to_bytes(8, "little"))
    with pytest.raises(BadPickleError, match="a frame of 1,073,741,825 bytes"):
        other.receive()
