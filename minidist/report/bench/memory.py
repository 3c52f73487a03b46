"""What the memory account costs: the same training step without it, with it, and with a timeline, interleaved.

When it is off nothing is paid: `track` is then one look at a ContextVar, which is in both sides of every other
benchmark.

Proved by: tests/bench/test_step.py
"""

from typing import Any

from minidist.base.memory import MemoryAccount
from minidist.base.process import tune_process
from minidist.base.watchers import watching
from minidist.report.bench.environment import environment
from minidist.report.bench.harness import Step, known_cases, row_of
from minidist.report.bench.step import time_steps
from minidist.report.bench.workloads import CASES, StepCase, make_model, own_step

TARGET = 1.05


def bench_memory(names: list[str] | None = None, rounds: int = 12) -> dict[str, Any]:
    """Return {environment, rows}: for each case (default: all) the time with the account, and with a timeline, over the
    time without.
    """
    known_cases(names or [], CASES, "bench memory")
    tuned = tune_process()
    rows = [row for name in names or CASES for row in compare(CASES[name], rounds)]
    return {"environment": {**environment(False), "process": tuned}, "rows": rows}


def compare(case: StepCase, rounds: int) -> list[dict[str, Any]]:
    """Return the two rows of one case; each side is a separate job with the same weights."""
    sides = {
        "off": own_step(case, make_model(case)),
        "on": _accounted(case, MemoryAccount()),
        "timeline": _accounted(case, MemoryAccount(timeline=True)),
    }

    # The first step allocates what later steps use again.
    for step in sides.values():
        step()
    times, _ = time_steps(sides, case.steps, rounds)
    names = {side: f"{case.name}: account {side} against off" for side in ("on", "timeline")}
    return [row_of(name, times, side, "off", rounds, TARGET) for side, name in names.items()]


def _accounted(case: StepCase, account: MemoryAccount) -> Step:
    """Return the step of a job whose model, optimizer state and activations are all in `account`."""

    def inside(function: Any, *arguments: Any) -> Any:
        with watching(account):
            return function(*arguments)

    # The model is made inside the account too, so that weights and optimizer state are counted.
    step = inside(own_step, case, inside(make_model, case))

    def accounted() -> float:
        if account.events is not None:
            account.events.clear()  # the timeline of one step
        return float(inside(step))

    return accounted
