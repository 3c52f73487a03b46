"""How fast is a training step, beside PyTorch's on the same machine: the same model, weights, batches and optimizer.

Both sides run interleaved in one process. Which BLAS kernel each side uses decides much, so the environment is part of
the result. PyTorch is imported only when a comparison is asked for; without it the ratios are None.

Proved by: tests/bench/test_step.py
"""

import gc
import resource
import statistics
import time
from typing import Any

import numpy as np

from minidist.autograd import Tensor
from minidist.base.errors import UsageError
from minidist.base.process import tune_process
from minidist.bench.harness import (
    Step,
    Times,
    environment,
    has_torch,
    interleave,
    known_cases,
    median_ratio,
    seconds_per_call,
    warm_up,
)
from minidist.bench.workloads import CASES, StepCase, make_model, own_step


def bench_step(names: list[str] | None = None, rounds: int = 8) -> dict[str, Any]:
    """Return {environment, rows} of the named cases (default: all). At least 6 rounds."""
    if rounds < 6:
        raise UsageError(f"bench step: {rounds} rounds are too few for a median of ratios; use at least 6")
    known_cases(names or [], CASES, "bench step")
    tuned = tune_process()
    rows = [compare_case(CASES[name], rounds) for name in names or CASES]
    return {"environment": {**environment(has_torch()), "process": tuned, "tape": tape_microseconds()}, "rows": rows}


def compare_case(case: StepCase, rounds: int = 8) -> dict[str, Any]:
    """Time one case; {name, ratio, median_s, torch_median_s, best_ratio, rounds, target, faults_per_step, losses}.

    Without torch there is no other side: ratio, torch_median_s and best_ratio are None. MinidistError when the losses
    of the first steps differ.
    """
    sides = {"own": own_step(case, make_model(case))}
    if has_torch():
        from minidist.bench.torch_peer import torch_step

        sides["torch"] = torch_step(case, make_model(case))

    # No ratio of a step that computes something else.
    losses = warm_up(sides, f"bench step {case.name}")
    times, faults = time_steps(sides, case.steps, rounds)
    own, other = times["own"], times.get("torch")
    return {
        "name": case.name,
        "ratio": median_ratio(own, other),
        "median_s": statistics.median(own),
        "torch_median_s": statistics.median(other) if other else None,
        "best_ratio": min(own) / min(other) if other else None,
        "rounds": rounds,
        "target": case.target,
        "faults_per_step": faults / case.steps,
        "losses": losses,
    }


def time_steps(sides: dict[str, Step], steps: int, rounds: int) -> tuple[Times, int]:
    """Return the seconds per step of each side in each round, and the minor page faults of our last round."""
    faults = 0

    def seconds(name: str) -> float:
        nonlocal faults
        sides[name]()
        # Minor page faults count memory that was returned to the system and taken again.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result = seconds_per_call(sides[name], steps)
        if name == "own":
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return result

    gc.collect()

    # A collection would fall into one side's time.
    gc.disable()
    try:
        times = interleave(list(sides), rounds, seconds)
    finally:
        gc.enable()
    return times, faults


def tape_microseconds(count: int = 2000, repeats: int = 9) -> dict[str, float]:
    """Return the microseconds that one operation on four numbers takes to record, and with its backward; minima."""
    other = Tensor(np.ones(4, np.float32))
    forward, both = [], []

    # A chain of operations on four numbers: there is next to nothing but the tape.
    gc.disable()
    for _ in range(repeats):
        y = Tensor(np.ones(4, np.float32), requires_grad=True)
        start = time.perf_counter()
        for _ in range(count):
            y = y + other
        middle = time.perf_counter()
        y.backward(np.ones(4, np.float32))
        forward.append(middle - start)
        both.append(time.perf_counter() - start)
    gc.enable()
    return {"forward_us": min(forward) / count * 1e6, "forward_backward_us": min(both) / count * 1e6}
