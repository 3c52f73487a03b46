"""The error of a plan.

Proved by: tests/pipeline/test_plans.py
"""

from minidist.core.base.errors import UsageError


class PlanError(UsageError):
    """A plan that cannot be executed, or whose result would be wrong."""
