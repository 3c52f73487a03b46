"""More schedules, one file each, and plans from text, files and functions.

    from minidist.pipeline.schedules import get_schedule, load_plan

The schedules of `minidist.core.pipeline.schedules` are those that a reader begins with, and `get_schedule` finds them,
too. A new one is a new file in this folder.

schedule.py   a schedule that says which numbers of micro-batches it takes, and what else options change
text.py       actions and plans as text, and CSV files
load.py       a plan from the command line: a name, a file, or a function in a Python file
refusals.py   sizes and options that a schedule cannot have
"""

from minidist.base.extras import import_modules
from minidist.core.pipeline.schedules import SCHEDULES, Schedule, get_schedule
from minidist.pipeline.schedules.load import load_plan
from minidist.pipeline.schedules.text import from_cells, from_csv, from_text, read, read_csv

import_modules(__name__, __path__)  # the files register their schedules

# The names that libraries and papers give to the core's schedules.
for _name, _others in {
    "gpipe": ("ScheduleGPipe", "afab", "all-forward-all-backward"),
    "1f1b": ("Schedule1F1B", "pipedream-flush", "forward_backward_pipelining_without_interleaving", "dapple"),
    "interleaved": ("ScheduleInterleaved1F1B", "interleaved-1f1b", "forward_backward_pipelining_with_interleaving"),
    "zb-h1": ("zb1p", "zero-bubble", "ScheduleZBH1"),
    "zb-h2": ("zb2p", "ScheduleZBH2"),
}.items():
    SCHEDULES.add(_name, SCHEDULES[_name], _others)


def schedules() -> dict[str, Schedule]:
    """Return all schedules by name, sorted."""
    return dict(sorted(SCHEDULES.items()))
