"""How fast is a training step, compared with PyTorch's of the same model, weights, batches and optimizer?

Both sides run interleaved in one process. Which BLAS kernel each side uses decides much, so the environment is part of
the result. PyTorch is imported only when a comparison is asked for; without it the ratios are None.

`bench_memory` times the same step without the memory account, with it, and with a timeline. When the account is off
nothing is paid: `track` is then one look at a ContextVar, which is in both sides of every other benchmark.

Proved by: tests/bench/test_step.py
"""

import gc
import resource
import time
from typing import Any

import numpy as np

from minidist.base.arrays import Device
from minidist.base.device import device_of
from minidist.base.memory import MemoryAccount
from minidist.base.process import tune_process
from minidist.base.watchers import watching
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.report.bench.environment import environment, has_torch
from minidist.report.bench.harness import (
    Step,
    Times,
    best_and_median,
    interleave,
    known_cases,
    row_of,
    seconds_per_call,
    warm_up,
)
from minidist.report.bench.products import measure_products
from minidist.report.bench.workloads import CASES, GPU_CASES, StepCase, make_model, own_step

ACCOUNT_TARGET = 1.05  # of a step with the memory account


def bench_step(
    names: list[str] | None = None, rounds: int = 8, device: str = "cpu", against: str | None = "torch"
) -> dict[str, Any]:
    """Return {environment, rows} of the named cases. At least 6 rounds.

    names: default all, and GPT-2 small on a GPU. device: cpu or cuda, for both sides. against: torch, or None to
    measure minidist alone. Errors: UsageError for another device, and where there is no GPU.
    """
    if rounds < 6:
        raise UsageError(f"bench step: {rounds} rounds are too few for a median of ratios; use at least 6")
    known = CASES if device == "cpu" else {**CASES, **GPU_CASES}
    known_cases(names or [], known, "bench step")
    made_on, peer = device_of(device), against if has_torch() else None
    if device == "cuda" and peer is not None:
        from minidist.report.bench.torch_peer import check_cuda

        check_cuda()
    tuned = tune_process()
    rows = [compare_case(known[name], rounds, made_on, peer) for name in names or (GPU_CASES if made_on else CASES)]
    found = {**environment(peer is not None), **gpu(made_on), "process": tuned, "tape": tape_microseconds()}
    return {"environment": found, "rows": rows}


def compare_case(
    case: StepCase, rounds: int = 8, device: Device | None = None, against: str | None = "torch"
) -> dict[str, Any]:
    """Time one case; {name, ratio, median_s, torch_median_s, best_ratio, rounds, target, faults_per_step, losses}.

    Without torch there is no other side: ratio, torch_median_s and best_ratio are None. On the host the row also says
    what the matrix products take, and the rest (`products.measure_products`). MinidistError when the losses of the
    first steps differ.
    """
    sides = {"own": own_step(case, make_model(case), device)}
    if against is not None and has_torch():
        from minidist.report.bench.torch_peer import torch_step

        sides["torch"] = torch_step(case, make_model(case), "cpu" if device is None else "cuda")

    # No ratio of a step that computes something else.
    losses = warm_up(sides, f"bench step {case.name}")
    times, faults = time_steps(sides, case.steps, rounds)
    row = row_of(case.name, times, "own", "torch", rounds, case.target if device is None else case.gpu_target)
    row |= {**best_and_median(times), "faults_per_step": faults / case.steps, "losses": losses}
    return row | (measure_products(sides["own"], row["median_s"]) if device is None else {})


def gpu(device: Device | None) -> dict[str, Any]:
    """Return what decides a timing on a GPU: its name, and CuPy's version. Nothing on the host."""
    if device is None:
        return {}
    runtime = getattr(getattr(device, "cuda", None), "runtime", None)
    name = None if runtime is None else runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
    return {"gpu": name, "cupy": getattr(device, "__version__", None)}


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


def bench_memory(names: list[str] | None = None, rounds: int = 12) -> dict[str, Any]:
    """Return {environment, rows}: for each case (default: all) the time with the account, and with a timeline, over the
    time without.
    """
    known_cases(names or [], CASES, "bench memory")
    tuned = tune_process()
    rows = [row for name in names or CASES for row in compare_accounts(CASES[name], rounds)]
    return {"environment": {**environment(False), "process": tuned}, "rows": rows}


def compare_accounts(case: StepCase, rounds: int) -> list[dict[str, Any]]:
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
    return [row_of(name, times, side, "off", rounds, ACCOUNT_TARGET) for side, name in names.items()]


def _accounted(case: StepCase, account: MemoryAccount) -> Step:
    """Return the step of a job whose model, optimizer state and activations are all in `account`."""
    # The model is made inside the account too, so that weights and optimizer state are counted.
    with watching(account):
        step = own_step(case, make_model(case))

    def accounted() -> float:
        if account.events is not None:
            account.events.clear()  # the timeline of one step
        with watching(account):
            return step()

    return accounted


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
