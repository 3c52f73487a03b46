"""What the account of memory costs: the same training step without it, with it, and with a timeline, interleaved.

Nothing is paid when it is off: `track` is then one look at a ContextVar, which is in both sides of every other
benchmark.
"""

import statistics
from typing import Any

from minidist.base.errors import UsageError, nearest
from minidist.base.memory import MemoryAccount, memory_account
from minidist.base.process import tune_process
from minidist.bench.step import CASES, Step, StepCase, environment, interleave, make_model, own_step

TARGET = 1.05


def bench_memory(names: list[str] | None = None, rounds: int = 12) -> dict[str, Any]:
    """{environment, rows}: for each case (all when None) the time with the account, and with a timeline, over that
    without.
    """
    for name in names or ():
        if name not in CASES:
            raise UsageError(f"bench memory: no case {name!r}{nearest(name, CASES)}; one of {', '.join(CASES)}")
    tuned = tune_process()
    rows = [row for name in names or CASES for row in compare(CASES[name], rounds)]
    return {"environment": {**environment(False), "process": tuned}, "rows": rows}


def compare(case: StepCase, rounds: int) -> list[dict[str, Any]]:
    """Two rows of one case; each side is a job of its own with the same weights."""
    sides = {
        "off": own_step(case, make_model(case)),
        "on": _accounted(case, MemoryAccount()),
        "timeline": _accounted(case, MemoryAccount(timeline=True)),
    }
    for step in sides.values():
        step()
    times, _ = interleave(sides, case.steps, rounds)
    return [
        {
            "name": f"{case.name}: account {side} against off",
            "ratio": statistics.median(a / b for a, b in zip(times[side], times["off"], strict=True)),
            "median_s": statistics.median(times[side]),
            "rounds": rounds,
            "target": TARGET,
        }
        for side in ("on", "timeline")
    ]


def _accounted(case: StepCase, account: MemoryAccount) -> Step:
    def inside(function: Any, *arguments: Any) -> Any:
        token = memory_account.set(account)
        try:
            return function(*arguments)
        finally:
            memory_account.reset(token)

    step = inside(own_step, case, inside(make_model, case))
    if account.events is not None:
        events = account.events

        def with_timeline() -> float:
            events.clear()  # a step's worth
            return float(inside(step))

        return with_timeline
    return lambda: inside(step)
