"""Schedules as data: actions, plans, and one file per schedule, from GPipe to DualPipe."""

from minidist.base.registry import import_modules
from minidist.pipeline.plan.action import KINDS as KINDS
from minidist.pipeline.plan.action import Action as Action
from minidist.pipeline.plan.action import B as B
from minidist.pipeline.plan.action import F as F
from minidist.pipeline.plan.action import I as I
from minidist.pipeline.plan.action import Item as Item
from minidist.pipeline.plan.action import W as W
from minidist.pipeline.plan.action import actions_of as actions_of
from minidist.pipeline.plan.action import show as show
from minidist.pipeline.plan.plan import Plan as Plan
from minidist.pipeline.plan.registry import Schedule as Schedule
from minidist.pipeline.plan.registry import get_schedule as get_schedule
from minidist.pipeline.plan.registry import schedule as schedule
from minidist.pipeline.plan.registry import schedules as schedules

import_modules(__name__, __path__)  # the files register their schedules
