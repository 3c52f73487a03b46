"""A museum of bugs: each was found in public code, and each passed its authors' tests.

Running an exhibit injects its bug into the code that trains, in memory and for the time of the run; no file is wrong.
The same small job runs with and without the bug, so that a reader sees what its authors saw (a loss that falls) and
what they missed (different gradients and weights). The tests of minidist that the exhibit names fail with it.

catalogue.py          the list of all exhibits, from catalogue.toml
exhibit.py            an exhibit as data
exhibit_run.py        one run of an exhibit, with the bug and without it
gradients.py          bugs of gradients
messages.py           bugs of messages
memory.py             bugs of memory
pipelines.py          bugs of pipelines
split.py              bugs of split layers and sequences
recent_data.py        bugs of data, from threads of 2024 to 2026
recent_losses.py      bugs of divisors and of clipping, from such threads
recent_parallel.py    bugs of split layers, experts and sequences, from such threads
recent_optimizer.py   bugs of accumulated gradients, their norm and the optimizer, from such threads
recent_loss_scales.py bugs of the loss on split vocabularies, sequences and pipelines, from such threads
jobs.py               small jobs of the exhibits
split_jobs.py         small jobs of the exhibits of split layers
data_jobs.py          small jobs of the exhibits of data

Proved by: tests/museum/test_museum.py, tests/museum/test_recent.py, tests/museum/test_recent_optimizer.py,
tests/museum/test_checks.py
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.course.museum.catalogue import exhibits, find
    from minidist.course.museum.exhibit import Catch, CheckResult, Exhibit, Patch, Recording
    from minidist.course.museum.exhibit_run import ExhibitRun, run_exhibit

__all__ = ["Catch", "CheckResult", "Exhibit", "Patch", "Recording", "ExhibitRun", "exhibits", "find", "run_exhibit"]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
