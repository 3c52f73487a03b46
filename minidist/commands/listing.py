"""The list of all commands, as Typer prints it where there are no colours, without Typer.

Proved by: tests/commands/test_command.py
"""

import os
import sys
from collections.abc import Mapping
from textwrap import wrap

# The widths at which Typer's columns are as wide as their longest entry, and what makes its output another one.
WIDTHS = range(60, 300)
FORCING = ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def width_without_colours() -> int | None:
    """Return the columns of an output that is no terminal; None where Typer would print colours, or in another way."""
    if sys.stdout.isatty() or any(name in os.environ for name in FORCING) or sys.stdout.encoding.lower() != "utf-8":
        return None
    width = 80
    for stream in (0, 1, 2):
        try:
            width = os.get_terminal_size(stream).columns or width
            break
        except OSError:
            continue
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else width
    return width if width in WIDTHS else None


def listing(about: str, commands: Mapping[str, str], width: int) -> str:
    """Return the help of the program in lines of `width` columns. commands: the first line of each one's help."""
    lines = ["", "Usage: minidist [OPTIONS] COMMAND [ARGS]...", "", *wrap(about, width - 2), ""]
    text = "".join(f" {line}".ljust(width) + "\n" for line in lines)
    options = {
        "--version          ": "print the version and exit",
        "--help     -h      ": "Show this message and exit.",
    }
    return text + _panel("Options", options, width) + _panel("Commands", commands, width) + "\n"


def _panel(title: str, rows: Mapping[str, str], width: int) -> str:
    """Return a box with two columns, the second one wrapped."""
    first, inner = max(map(len, rows)) + 2, width - 4
    lines = []
    for name, text in rows.items():
        for number, part in enumerate(wrap(text, inner - first, break_on_hyphens=False)):
            lines.append(f"│ {(name if number == 0 else '').ljust(first) + part:{inner}} │\n")
    return f"╭─ {title} {'─' * (width - len(title) - 5)}╮\n{''.join(lines)}╰{'─' * (width - 2)}╯\n"
