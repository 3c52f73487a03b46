"""Pipeline schedules as data: actions, plans, and one file per schedule."""

from minidist.base.registry import import_modules
from minidist.pipeline.plan.action import KINDS, Action, B, F, I, Item, W, actions_of, read, show
from minidist.pipeline.plan.load import load_plan
from minidist.pipeline.plan.plan import Plan, from_cells, from_csv, from_text, read_csv
from minidist.pipeline.plan.registry import Schedule, get_schedule, schedule, schedules

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
