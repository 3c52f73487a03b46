"""All schedules, and plans from text, files and functions. A program imports from here, and so finds every schedule.

    from minidist.pipeline.schedules import get_schedule, load_plan

Those of `minidist.pipeline.plan` are the ones that a reader begins with; a new one is a new file in this folder.

text.py       actions and plans as text, and CSV files
load.py       a plan from the command line: a name, a file, or a function in a Python file
updates.py    plans that update their weights on the way: the versions of the weights that they need
"""

from minidist.base.registry import import_modules
from minidist.pipeline.plan import (
    KINDS,
    Action,
    B,
    F,
    I,
    Item,
    Plan,
    Schedule,
    W,
    actions_of,
    get_schedule,
    schedule,
    schedules,
    show,
)
from minidist.pipeline.schedules.load import load_plan
from minidist.pipeline.schedules.text import from_cells, from_csv, from_text, read, read_csv

import_modules(__name__, __path__)  # the files register their schedules

__all__ = [
    "KINDS",
    "Action",
    "B",
    "F",
    "I",
    "Item",
    "Plan",
    "Schedule",
    "W",
    "actions_of",
    "from_cells",
    "from_csv",
    "from_text",
    "get_schedule",
    "load_plan",
    "read",
    "read_csv",
    "schedule",
    "schedules",
    "show",
]
