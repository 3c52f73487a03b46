"""The entry point of the program `minidist`. The commands are in minidist/commands, one file each.

Proved by: tests/commands/test_cli.py
"""

from minidist.commands.app import main

if __name__ == "__main__":
    main()
