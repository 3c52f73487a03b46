"""Which checkpoints of a --save directory count; a technique says it (`Extension.history`).

Proved by: tests/checkpoint/test_resume.py
"""

from typing import NamedTuple


class History(NamedTuple):
    """keep: how many of a run are kept; None keeps all. from_step: which one a job goes on from; None: the latest one.

    overwrite: whether a new run may begin in a directory with checkpoints.
    """

    keep: int | None = None
    from_step: int | None = None
    overwrite: bool = False
