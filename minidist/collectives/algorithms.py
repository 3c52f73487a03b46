"""All algorithms of each collective: those of the core, and those that the files of this package register.

    ALGORITHMS["all_reduce"]     {"ring": ..., "ordered": ..., "recursive_doubling": ..., ...}

The table is that of the core. This module imports every file that adds to the table, so that all names are in it.

Proved by: tests/collectives/test_collectives.py, tests/base/test_hooks.py
"""

from minidist.core.base import hooks
from minidist.core.collectives.calls import ALGORITHMS as ALGORITHMS
from minidist.core.collectives.calls import Algorithm

hooks.load_more(ALGORITHMS["all_reduce"])


def candidates(operation: str) -> dict[str, Algorithm]:
    """Return the algorithms that "auto" chooses among: those with a formula, in the same order on every rank."""
    return {name: entry for name, entry in sorted(ALGORITHMS[operation].items()) if entry.seconds is not None}
