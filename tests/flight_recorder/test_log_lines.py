"""Reading a log: lines that are wrapped, run together, endless or compressed, and no more memory than a block."""

import gzip
import io
import itertools
import time

from minidist.debug.flight_recorder.log_lines import BLOCK, MAX_LINE, joined, log_lines, records, split
from tests.flight_recorder.lines import status, timeout


def read(tmp_path, content):
    (tmp_path / "job.log").write_bytes(content)
    return list(log_lines(tmp_path / "job.log"))


def test_a_wrapped_line_becomes_one(tmp_path):
    line, next_line = timeout(1, 4), timeout(2, 4)
    for at in (130, 150, 175, len(line) - 4):
        found = read(tmp_path, f"{line[:at]}\n{line[at:]}\n{next_line}\n".encode())
        assert found == [line, next_line], at
    said = status(1, 4, 5, 3)
    for at in (said.index(" enqueued"), len(said) - 3):
        assert read(tmp_path, f"{said[:at]}\n{said[at:]}\nepoch 3".encode()) == [said], at
    # What has been cut for good takes nothing from the line after it.
    assert read(tmp_path, f"{line[:150]}\n{next_line}\n".encode()) == [line[:150], next_line]


def test_a_line_of_two_processes_is_two_records():
    first, second, old = timeout(0, 4), timeout(1, 5), timeout(2, 6, form="2.0")
    assert records(f"12: {first}{second}{old}") == [f"12: {first}", second, old]
    assert records("no record") == ["no record"]


def test_forms_of_files(tmp_path):
    line = timeout(3, 9)
    for name, content in (
        ("windows", f"a\r\n{line}\r\n".encode()),
        ("progress bar", f"1%\r2%\r{line}\r3%".encode()),
        ("UTF-16", f"a\n{line}\n".encode("utf-16")),
        ("gzip", gzip.compress(f"a\n{line}\n".encode())),
        ("colours", f"\x1b[36mworker\x1b[0m {line}\n".encode().replace(b"\x1b[36mworker\x1b[0m ", b"\x1b[36m\x1b[0m")),
        ("no UTF-8", b"\xff\xfa\n" + line.encode()),
        ("across two blocks", b"x" * (BLOCK - 100) + b"\n" + line.encode()),
        ("after many blocks", (b"step 1\n" * 700_000) + line.encode()),
    ):
        assert read(tmp_path, content) == [line], name


def test_a_line_without_an_end_takes_no_more_than_a_block():
    class Endless(io.RawIOBase):
        def __init__(self):
            self.given = 0

        def read(self, size=-1):
            self.given += 1
            return b"\0" * size if self.given < 8 else b""

    endless = Endless()
    assert all(len(line) <= MAX_LINE for line in split(iter(lambda: endless.read(BLOCK), b"")))


def test_the_time_grows_with_the_length_only():
    """Beginnings that a pattern could try again and again."""
    hard = ["[E" * 8000, "Watchdog caught" * 1000, "[rank1]:" * 2000, "world size " * 1400, "Rank 1, " * 2000]
    began = time.process_time()
    for line in hard:
        for text in joined(iter([line.encode()] * 3)):
            records(text)
    assert time.process_time() - began < 2


def test_lines_without_a_word_are_left_out():
    lines = itertools.chain([b"epoch 1"] * 10, [timeout(0, 1).encode()], [b"epoch 2"] * 10)
    assert list(joined(lines)) == [timeout(0, 1)]
