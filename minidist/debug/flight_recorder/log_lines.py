"""Text logs of a job, read as a stream: the lines that may tell of a hang, in the order of the file.

    [rank3]:[E419 10:42:28.88 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught ...: WorkNCCL(SeqNum=7, OpTy
    pe=ALLREDUCE, NumelIn=1, ...) ran for ...    a terminal has wrapped the line: both halves become one line
    [rank0]:[E419 ...] ...[rank1]:[E419 ...] ... two processes have written into one line: it becomes two

A log may have gigabytes, lines without end and any bytes, so it is read in blocks, a block without any word of WORDS is
passed over, and every pattern takes a time that grows with the length of the line only.

Proved by: tests/flight_recorder/test_log_lines.py
"""

import gzip
import io
import re
from collections.abc import Iterator
from pathlib import Path

BLOCK = 1 << 20  # bytes that are read at once
MAX_LINE = 1 << 14  # bytes of a line; the rest of a longer one is read as the next
MAX_WRAPS = 3  # times that a terminal may have wrapped a line

# A line without any of these tells nothing, unless it is of a stack.
WORDS = tuple(
    word.encode()
    for word in (
        *("OpType=", "atchdog", " work:", "imed out", "stuck", "Stack trace of", "onitored", "following ranks"),
        *("by peer", "pair closure", "rror [", "collective #", "lagging ranks", "clients joined", "orld_size"),
        *("orld size", "ORLD_SIZE", "initialization options", "Error", "Exception", "exitcode", "rank  "),
    )
)
# Where a record of PyTorch's C++ log begins: "[rank3]:[E419 10:42:28.88 ProcessGroupNCCL.cpp:616]", older "[E file:1]".
RECORD = re.compile(r"(?:\[rank\d{1,7}\]:\s{0,4})?\[[EWIF]\d{0,8}\s[^\[\]]{0,40}?\w{1,60}\.(?:cpp|cc|hpp):\d{1,6}\]")
# What no terminal puts at the beginning of the second half of a line.
FRAME = re.compile(r"\s{0,9}#\d{1,4} ")
BEGINS = re.compile(r"\[rank\d|\[Rank \d|\[PG |ProcessGroup\w+\.cpp|^\s*#\d+ |Traceback")
COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


def is_text(start: bytes) -> bool:
    """Return whether a file that begins so is a text, or a compressed one; a UTF-16 text has a byte order mark."""
    return start[:2] in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff") or b"\0" not in start


def log_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, which may be compressed with gzip, that may tell of a hang."""
    with path.open("rb") as file:
        start = file.read(2)
        file.seek(0)
        if start == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                yield from joined(split(iter(lambda: unpacked.read(BLOCK), b"")))
        elif start in (b"\xff\xfe", b"\xfe\xff"):
            text = io.TextIOWrapper(file, "utf-16", errors="replace")
            yield from joined(split(block.encode() for block in iter(lambda: text.read(BLOCK), "")))
        else:
            yield from joined(split(iter(lambda: file.read(BLOCK), b"")))


def split(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of the blocks; of a block without any of WORDS only the first, which may end a wrapped line."""
    rest = b""
    for block in blocks:
        data = rest + block
        # A progress bar ends its lines with a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end == 0 and len(data) > MAX_LINE:
            end = len(data)
        data, rest = data[:end], data[end:]
        if any(word in data for word in WORDS):
            yield from pieces(data.replace(b"\r", b"\n").split(b"\n"))
        else:
            yield from pieces(data[:MAX_LINE].replace(b"\r", b"\n").split(b"\n", MAX_WRAPS)[:MAX_WRAPS])
    yield from pieces([rest])


def pieces(lines: list[bytes]) -> Iterator[bytes]:
    """Yield the lines, those that are longer than MAX_LINE in pieces."""
    for line in lines:
        if len(line) <= MAX_LINE:
            yield line
        else:
            yield from (line[at : at + MAX_LINE] for at in range(0, len(line), MAX_LINE))


def joined(lines: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines with one of WORDS as text, each with what follows it where a terminal has wrapped it."""
    begun, wraps, in_stack = "", 0, False
    for line in lines:
        if begun:
            text = line.decode("utf-8", "replace")
            if wraps < MAX_WRAPS and text and not BEGINS.search(text):
                begun, wraps = begun + text, wraps + 1
                if is_whole(begun):
                    yield begun
                    begun = ""
                continue
            yield begun
            begun = ""
        in_stack = in_stack and FRAME.match(text := line.decode("utf-8", "replace")) is not None
        if in_stack:
            yield text
        elif any(word in line for word in WORDS):
            text = COLOUR.sub("", line.decode("utf-8", "replace"))
            in_stack = "Stack trace of" in text
            if is_whole(text):
                yield text
            else:
                begun, wraps = text, 0
    if begun:
        yield begun


def is_whole(line: str) -> bool:
    """Return whether a record of a watchdog has its end in this line."""
    last = max(line.rfind(word) for word in ("Watchdog caught", "detected by watchdog", "Timeout at "))
    if last < 0:
        return True
    if line.startswith("Watchdog", last):
        return "before timing out" in line[last:]
    return re.search(r"completed\s{0,2}(?:\w{1,8}\s{0,2})?work:\s{0,2}-?\d", line[last:]) is not None


def records(line: str) -> list[str]:
    """Return the records of a line; what stands before the first belongs to it."""
    starts = [found.start() for found in RECORD.finditer(line)] if ".c" in line or ".h" in line else []
    return [line[a:b] for a, b in zip([0, *starts[1:]], [*starts[1:], len(line)], strict=True)] if starts else [line]
