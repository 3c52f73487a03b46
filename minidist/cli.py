"""The entry point of the program `minidist`. The commands are in minidist/commands, one file each.

Proved by: tests/commands/test_cli.py, tests/base/test_interrupts.py
"""

from minidist.base.interrupts import ends_at_interrupt

# NumPy and the commands take a second to import, and a KeyboardInterrupt in the middle of that has no good place.
with ends_at_interrupt():
    from minidist.commands.app import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
