"""Schedules as data: actions, plans, and one file per schedule, from GPipe to DualPipe."""

from minidist.base.registry import import_modules
from minidist.pipeline.plan.action import KINDS, Action, B, F, I, Item, W, actions_of, show
from minidist.pipeline.plan.plan import Plan
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
    "get_schedule",
    "schedule",
    "schedules",
    "show",
]
