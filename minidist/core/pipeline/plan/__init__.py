"""Schedules as data: actions, plans, and the schedules from GPipe to zero bubble, one file for each family."""

from minidist.core.pipeline.plan import gpipe, interleaved, one_f_one_b, zero_bubble  # noqa: F401  register schedules
from minidist.core.pipeline.plan.plan import KINDS as KINDS
from minidist.core.pipeline.plan.plan import Action as Action
from minidist.core.pipeline.plan.plan import B as B
from minidist.core.pipeline.plan.plan import F as F
from minidist.core.pipeline.plan.plan import I as I
from minidist.core.pipeline.plan.plan import Item as Item
from minidist.core.pipeline.plan.plan import Plan as Plan
from minidist.core.pipeline.plan.plan import Schedule as Schedule
from minidist.core.pipeline.plan.plan import W as W
from minidist.core.pipeline.plan.plan import actions_of as actions_of
from minidist.core.pipeline.plan.plan import get_schedule as get_schedule
from minidist.core.pipeline.plan.plan import schedule as schedule
from minidist.core.pipeline.plan.plan import show as show
