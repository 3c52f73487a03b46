"""`python -m minidist` is `minidist`."""

from minidist.commands.app import main

main()
