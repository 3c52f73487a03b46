"""The small jobs of the exhibits of data: a few epochs of seven samples, in one piece or resumed on other ranks.

All of them keep a ledger of the samples (`--check-data`), which a run of an exhibit turns off, as it does other checks,
to show what the bug does when nothing reports it.

Proved by: tests/museum/test_recent.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Recording

SAMPLES, BATCH, CONTEXT = 7, 4, 4  # so epochs end within steps


def global_batch_on(ranks: int) -> int:
    """Return the samples of a step: the same on any number of ranks."""
    return BATCH


def in_parts(*parts: dict[str, Any]) -> Recording:
    """Train in parts; each resumes the one before. Returns the last one's recording, with all losses.

    parts: settings, with `ranks`. The position in the data comes from the checkpoint.
    """
    with TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        np.save(tokens, (np.arange(SAMPLES * CONTEXT + 1) ** 2 % 13).astype(np.uint8))
        recording = Recording([], [])
        for number, part in enumerate(parts):
            ranks, settings = part["ranks"], {name: value for name, value in part.items() if name != "ranks"}
            saving = {"save": str(Path(folder) / "saved"), "resume": number > 0} if len(parts) > 1 else {}
            small = {"data": f"tokens:{tokens}", "width": 8, "context": CONTEXT, "layers": 1, "micro_batch": None}
            small |= {"global_batch": global_batch_on(ranks), "check_data": jobs.checks()}
            recording = jobs.train_job(ranks, **{**small, **saving, **settings})()
    return recording


def replicas() -> Recording:
    """Train two replicas for three epochs."""
    return in_parts({"ranks": 2, "dp": 2, "steps": 6})


def split_layers() -> Recording:
    """Train with layers that are split over two ranks, which read the same samples."""
    return in_parts({"ranks": 2, "tp": 2, "steps": 3, "precision": "fp64"})


def resumed() -> Recording:
    """Train two replicas, in two parts: the second one begins within an epoch."""
    return in_parts({"ranks": 2, "dp": 2, "steps": 3}, {"ranks": 2, "dp": 2, "steps": 6})


def resumed_on_one_rank() -> Recording:
    """Train two replicas, and go on with one: the second part begins within an epoch."""
    return in_parts({"ranks": 2, "dp": 2, "steps": 3}, {"ranks": 1, "steps": 6})


JOBS = {
    "replicas": replicas,
    "split layers": split_layers,
    "resumed": resumed,
    "resumed on one rank": resumed_on_one_rank,
}
