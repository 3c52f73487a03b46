"""`python -m minidist` is `minidist`."""

from minidist.cli import main

main()
