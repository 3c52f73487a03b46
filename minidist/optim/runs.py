"""Runs of an optimizer whose parameters have had unlike numbers of steps, and state without values.

Proved by: tests/optim/test_optimizers.py
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

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


def empty_state(optimizer: Optimizer, name: str, data: xp.Array) -> State:
    """Return arrays with the names, shapes and dtypes of the state of `data`, a part of parameter `name`."""
    return {key: xp.empty(data.size, computing(data.dtype), data) for key in optimizer.state_names(data.dtype, name)}
