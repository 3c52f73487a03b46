"""All algorithms of each collective: those of the core, and those that the files of this package register.

    ALGORITHMS["all_reduce"]     {"ring": ..., "ordered": ..., "recursive_doubling": ..., ...}

The table is that of the core. This module imports every file that adds to the table, so that all names are in it.

Proved by: tests/collectives/test_collectives.py, tests/base/test_hooks.py
"""

from minidist.core.base import hooks
from minidist.core.collectives.calls import ALGORITHMS as ALGORITHMS

hooks.load_more(ALGORITHMS["all_reduce"])
