"""Prints the title and the headings of a lesson that runs as a script; a notebook shows them.

Which part prints is read off the line of the script that runs.

Proved by: tests/lesson/test_setting.py
"""

import sys
from pathlib import Path
from typing import Any, TextIO, cast

from minidist.course.lesson.numbers import SOURCES


def print_headings() -> None:
    """Begin, where the program of this process is a lesson."""
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "")
    if not path.match(SOURCES) or not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    title = next((line.removeprefix("# # ") for line in lines if line.startswith("# # ")), "")
    if title:
        print(title)
        headings = {n: line.removeprefix("# ## ") for n, line in enumerate(lines, 1) if line.startswith("# ## ")}
        sys.stdout = cast(TextIO, _WithHeadings(sys.stdout, vars(main), headings))


class _WithHeadings:
    """A stream that writes a heading before the first text of its part. headings: line -> heading."""

    def __init__(self, stream: TextIO, script: dict[str, Any], headings: dict[int, str]) -> None:
        self.stream, self.script, self.headings, self.shown = stream, script, headings, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def fileno(self) -> int:
        """Raise OSError: `input` would write its question past this stream."""
        raise OSError("a stream that adds headings has no file")

    def write(self, text: str) -> int:
        part = max((line for line in self.headings if line <= self._line()), default=0)
        if part > self.shown:
            self.stream.write(f"\n## {self.headings[part]}\n\n")
            self.shown = part
        return self.stream.write(text)

    def _line(self) -> int:
        """Return the line of the script that runs; 0 in a simulated rank, which has a separate stack."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals is not self.script:
            frame = frame.f_back
        while frame.f_back is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        return frame.f_lineno if frame.f_globals is self.script else 0
