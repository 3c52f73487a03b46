"""The wire format of protobuf: as much of it as execution traces use, so that they need no library.

A message is a sequence of fields. A field is its number and wire type in one varint, then its value:

    wire type 0   varint: 7 bits per byte, the lowest first; the highest bit says that more follow
    wire type 1   8 bytes, wire type 5: 4 bytes, little-endian
    wire type 2   a varint with the number of bytes, then the bytes: texts, messages, packed lists

Files of many messages put a varint with the number of bytes in front of each.

Source: Protocol Buffers documentation, "Encoding".
Proved by: tests/report/test_chakra.py
"""

from collections.abc import Iterator
from typing import BinaryIO

from minidist.core.base.errors import UsageError

MAX_MESSAGE = 1 << 24  # bytes; a file that claims more is not one of these traces

Value = int | bytes


def varint(number: int) -> bytes:
    """Encode an integer; negative ones as their two's complement in 64 bits, as int32 and int64 are."""
    number &= (1 << 64) - 1
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def field(number: int, value: int | str | bytes) -> bytes:
    """Encode one field: an integer as a varint, a text or an encoded message with its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def delimited(message: bytes) -> bytes:
    """Put the number of bytes in front of a message."""
    return varint(len(message)) + message


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield each field's number and value: integers of varints, bytes of everything else. UsageError if it is none."""
    position = 0
    while position < len(message):
        key, position = _varint_at(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint_at(message, position)
            yield number, value
            continue
        if wire_type == 2:
            length, position = _varint_at(message, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise UsageError(f"field {number} has wire type {wire_type}, which protobuf does not have")
        if number == 0 or position + length > len(message):
            raise UsageError(f"field {number} has {length:,} bytes, and {len(message) - position:,} follow")
        yield number, message[position : position + length]
        position += length


def varints(packed: bytes) -> Iterator[int]:
    """Yield the integers of a packed list."""
    position = 0
    while position < len(packed):
        number, position = _varint_at(packed, position)
        yield number


def messages(file: BinaryIO) -> Iterator[bytes]:
    """Yield the messages of a file, each with its length in front. UsageError when the file ends inside one."""
    while first := file.read(1):
        head = first
        while head[-1] & 0x80 and len(head) < 10 and (more := file.read(1)):
            head += more
        length, _ = _varint_at(head, 0)
        if length > MAX_MESSAGE:
            raise UsageError(f"a message of {length:,} bytes; at most {MAX_MESSAGE:,} are read")
        message = file.read(length)
        if len(message) < length:
            raise UsageError(f"the file ends after {len(message):,} of a message's {length:,} bytes")
        yield message


def _varint_at(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer that begins at `position`, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (1 << 64) - 1, position
    raise UsageError("a number has no end")
