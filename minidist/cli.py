"""The entry point of the program `minidist`. The commands are in minidist/commands, one file each."""

from minidist.commands.app import main

if __name__ == "__main__":
    main()
