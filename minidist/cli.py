"""The entry point of the program `minidist`. The commands are in minidist/commands, one file each.

Proved by: tests/commands/test_cli.py, tests/base/test_interrupts.py
"""

import gc
import sys

from minidist.base.interrupts import ends_at_interrupt

# NumPy and a command take up to a second to import, and a KeyboardInterrupt in the middle of that has no good place.
# Nothing that an import makes is garbage: the cycle collector does not look for any, neither now nor later.
with ends_at_interrupt():
    collects = gc.isenabled()
    gc.disable()
    from minidist.commands.app import COMMANDS, GROUPS, first_word, loaded, main

    called = first_word(sys.argv[1:])
    if called in COMMANDS or called in GROUPS:
        loaded(called)
    gc.freeze()
    if collects:
        gc.enable()

__all__ = ["main"]

if __name__ == "__main__":
    main()
