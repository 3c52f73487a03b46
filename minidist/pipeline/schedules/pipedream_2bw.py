"""PipeDream-2BW: gradients of m micro-batches make one update, and two versions of the weights are always enough.

    micro-batch   0 .. m-1 | m .. 2m-1 | 2m .. 3m-1          no flush between the batches
    version       0        | 0         | 1                   max(floor(k/m) - 1, 0), on every stage, in F and in B

W(t+1) = W(t) - lr grad f(W(t-1)): the same delay of one on every stage. The schedule needs m >= p; otherwise a batch's
update would come too late for the second batch after it. Source: Narayanan et al., PipeDream-2BW, ICML 2021.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_pipedream.py
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan import Orders, Plan
from minidist.core.pipeline.schedules import stage_order
from minidist.pipeline.schedules.schedule import schedule


def _at_least_p(p: int, m: int, v: int) -> str | None:
    return None if m >= p else f"it needs at least {p} in a batch"


def _complete(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return the plan of all batches; each batch is one update."""
    m = plan.microbatches
    return replace(plan, microbatches=m * options.get("batches", 1), batch=m)


@schedule("pipedream-2bw", aliases=("2bw",), takes=_at_least_p, updates="2bw", complete=_complete)
def pipedream_2bw(p: int, m: int, batches: int = 1) -> Orders:
    """Return 1F1B without a flush over `batches` batches of m micro-batches, numbered through."""
    if batches < 1:
        raise UsageError(f"batches is {batches}; it must be at least 1")
    return [stage_order(s, m * batches, min(m * batches, p - 1 - s)) for s in range(p)]
