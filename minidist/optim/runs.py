"""Runs of an optimizer whose parameters have had unlike numbers of steps, and what ranks compare of a step.

Proved by: tests/optim/test_optimizers.py
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from zlib import crc32

from minidist.core.base import arrays as xp
from minidist.core.optim.optimizer import Optimizer, State, computing


def cut_run(run: Any, kinds: list[Any]) -> list[Any]:
    """Return the run as runs of neighbours of one kind; kinds: one per piece. The state becomes views of it."""
    if kinds.count(kinds[0]) == len(kinds):
        return [run]
    starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    runs = []
    for i, end in pairwise([*starts, len(kinds)]):
        pieces = run.pieces[i:end]
        start, stop = pieces[0][1], pieces[-1][2]
        part = replace(
            run,
            slice=replace(run.slice, start=run.slice.start + start, stop=run.slice.start + stop),
            pieces=[(name, first - start, last - start) for name, first, last in pieces],
            parameters=run.parameters[i:end],
            state=None if run.state is None else {key: a[start:stop] for key, a in run.state.items()},
        )
        runs.append(part)
    return runs


def describe_step(optimizer: Optimizer) -> str:
    """Return the number of steps, the learning rate, and a checksum of all settings, in one line."""
    settings = (getattr(optimizer, name) for name in optimizer.settings)
    values = [type(optimizer).__name__, *settings, float(optimizer.grad_scale)]
    groups = [(float(g.lr_scale), None if (w := g.weight_decay) is None else float(w)) for g in optimizer.groups]
    checksum, count = crc32(repr((values, groups)).encode()), optimizer.step_count
    lr = optimizer.lr * optimizer.lr_factor
    return f"{count} update{'s' * (count != 1)} with lr {lr:.6g}, checksum of the settings {checksum:08x}"


def empty_state(optimizer: Optimizer, name: str, data: xp.Array) -> State:
    """Return arrays with the names, shapes and dtypes of the state of `data`, a part of parameter `name`."""
    return {key: xp.empty(data.size, computing(data.dtype), data) for key in optimizer.state_names(data.dtype, name)}
