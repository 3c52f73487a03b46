"""PipeDream: no flush. The pipeline never drains; a stage updates its weights after every backward.

    rank 0   F0 F1 F2 .. B0 F3 B1 F4 B2 F5 B3 ...        1F1B's order over an endless stream, drained at the end
                          ↑ update 1   ↑ update 2        F3 sees version 1, its B must see version 1 too: stash it

Mini-batch t uses on stage s version max(0, t - (p-1-s)) in F and in B, so stage s keeps p-s versions:
W(t+1) = W(t) - lr grad f(w_0^(t-p+1), ..., w_{p-1}^(t)). With `stashing=False` B would use version t, which is the
gradient of no function. With vertical sync every stage uses the version that stage 0 had when t entered.

Replicas of a stage take mini-batches round robin, so a slow stage keeps up with fast ones:

    replicas=(2, 1)   rank 0  stage 0: F0 F2 B0 F4 B2 ..     warm-up floor((ranks from this stage on - 1) / replicas),
                      rank 1  stage 0: F1 F3 B1 F5 B3 ..     so NOAM = ceil(ranks / replicas of stage 0) mini-batches
                      rank 2  stage 1: F0 B0 F1 B1 F2 B2     are on their way for each replica of stage 0

Sources: Harlap et al., arXiv:1806.03377; Narayanan et al., PipeDream, SOSP 2019.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_pipedream.py
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.pipeline.plan import STEP, Action, Orders, Plan, actions_of
from minidist.core.pipeline.schedules import stage_order
from minidist.pipeline.schedules.schedule import schedule


def _complete(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return the plan with fewer stages than ranks where stages have replicas, and without stashing as asked for."""
    if options.get("stashing") is False:
        plan = replace(plan, updates="no-stash")
    if options.get("replicas") is None:
        return plan
    return replace(plan, stages=1 + actions_of(plan.orders[-1][0])[0].stage)


@schedule("pipedream", aliases=("weight-stashing", "asynchronous-1f1b"), updates="stash", complete=_complete)
def pipedream(p: int, m: int, stashing: bool = True, replicas: Any = None) -> Orders:
    """Return 1F1B's order over a stream of m mini-batches, with an update after each.

    replicas: the ranks of each stage, p together, as (2, 1) or "2,1".
    """
    if replicas is None:
        return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]
    counts, orders = read_replicas(replicas, p, m), []
    for s, k in enumerate(counts):
        for r in range(k):
            mine = len(range(r, m, k))
            order = stage_order(s, mine, min(mine, (sum(counts[s:]) - 1) // k))
            # Its i-th mini-batch is number i k + r of the stream.
            orders.append([action + (Action(action).microbatch * (k - 1) + r) * STEP for action in order])
    return orders


def read_replicas(replicas: Any, p: int, m: int) -> list[int]:
    """Return the ranks of each stage; UsageError when they do not make p ranks, or leave a replica without work."""
    try:
        given = replicas.split(",") if isinstance(replicas, str) else replicas
        counts = [int(x) for x in ([given] if isinstance(given, int) else given)]
    except (TypeError, ValueError):
        raise UsageError(f"replicas={quoted(replicas)}; write the ranks of each stage, such as 2,1") from None
    if min(counts, default=0) < 1 or sum(counts) != p:
        raise UsageError(
            f"replicas={quoted(replicas)} make {sum(counts)} ranks and there are {p}; give each stage at least one, {p}"
            " together"
        )
    if m < max(counts):
        raise UsageError(
            f"{m} mini-batches leave a replica of the {max(counts)} without work; take at least {max(counts)}"
        )
    return counts


@schedule("pipedream-vertical-sync", aliases=("vertical-sync",), updates="vertical-sync")
def pipedream_vertical_sync(p: int, m: int) -> Orders:
    """Return PipeDream's order; the versions differ."""
    return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]
