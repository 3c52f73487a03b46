"""The state of an optimizer: `optimizer.state`, `counts`, `state_dict()`, `load_state_dict(saved)` and `refresh()`.

Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, nearest
from minidist.base.limits import check_whole
from minidist.core.optim.optimizer import State
from minidist.optim.runs import cut_run


def state(optimizer: Any) -> dict[str, State]:
    """Return the state, {parameter name: {state name: 1-D view}}, of the parameters that have had a step."""
    return {
        name: {key: array[start:stop] for key, array in run.state.items()}
        for run in optimizer._runs
        if run.state is not None
        for name, start, stop in run.pieces
    }


def counts(optimizer: Any) -> dict[str, int]:
    """Return the steps of each parameter that has had fewer than `step_count`, by name; usually none."""
    steps = optimizer.step_count
    return {name: run.count for run in optimizer._runs if run.count != steps for name, _, _ in run.pieces}


def state_dict(optimizer: Any) -> dict[str, Any]:
    """Return {"step": steps taken, "state": `state`}. The arrays are views, not copies (as in PyTorch).

    Where parameters have had other numbers of steps, these are in "counts", {parameter name: number}.
    """
    fewer = optimizer.counts
    return {"step": optimizer.step_count, "state": optimizer.state, **({"counts": fewer} if fewer else {})}


def refresh(optimizer: Any) -> None:
    """Note that the parameters were changed elsewhere; for an optimizer that steps copies of them."""


def load_state_dict(optimizer: Any, saved: dict[str, Any]) -> None:
    """Copy a `state_dict` of the same slices into `optimizer`.

    Without "counts" all parameters have had all steps. Raises UsageError for a state that is missing, unknown, or of
    another shape or dtype, with its parameter's name.
    """
    _check_dict(saved)
    count = check_whole("step", saved["step"])
    counts_of = {name: check_whole(f"counts[{name!r}]", n) for name, n in saved.get("counts", {}).items()}
    # A state of an unknown parameter is a mistake of the caller; silence would lose it.
    states = saved["state"]
    names = [name for run in optimizer._runs for name, _, _ in run.pieces]
    for name in (*states, *counts_of):
        if name not in names:
            raise UsageError(f"optimizer state of {name!r}: no such parameter here{nearest(name, names)}")

    optimizer._runs = [
        part
        for run in optimizer._runs
        for part in cut_run(run, [counts_of.get(name, count) for name, _, _ in run.pieces])
    ]
    for run in optimizer._runs:
        have = [name in states for name, _, _ in run.pieces]
        run.state, first = None, run.pieces[0][0]
        run.count = counts_of.get(first, count)
        if not any(have):
            # No step has made a state yet, unless this optimizer has none.
            run.count *= not optimizer.state_names(run.slice.data.dtype, first)
            continue

        # A run has one state for all its parameters, so all of them must have had a step, or none.
        own = optimizer._make_state(run, run.slice.data)
        for name, start, stop in run.pieces:
            if name not in states:
                present = run.pieces[have.index(True)][0]
                raise UsageError(f"optimizer state of {name!r} is missing; that of {present!r} is there")
            _fill(optimizer, name, {key: array[start:stop] for key, array in own.items()}, states[name])
    optimizer.step_count = count


def _check_dict(saved: Any) -> None:
    """Raise UsageError for what is no `state_dict` of an optimizer."""
    if not isinstance(saved, Mapping) or not {"step", "state"} <= saved.keys():
        raise UsageError("load_state_dict needs a dict with 'step' and 'state', as an optimizer's state_dict() returns")


def _fill(optimizer: Any, name: str, places: Mapping[str, xp.Array], state: Mapping[str, xp.Array]) -> None:
    """Copy the saved state of a parameter into its places; UsageError where a value would be converted."""
    if set(state) != set(places):
        raise UsageError(
            f"optimizer state of {name!r} has {sorted(state)}; {type(optimizer).__name__} needs {sorted(places)}"
        )
    for key, place in places.items():
        value = state[key]
        if value.shape != place.shape or value.dtype != place.dtype:
            raise UsageError(
                f"optimizer state {key!r} of {name!r} is {value.shape} {value.dtype}; "
                f"this optimizer needs {place.shape} {place.dtype}"
            )
        xp.store(place, value)


def attribute(optimizer: Any, name: str) -> Any:
    """Return the attribute of an optimizer that one of these functions is."""
    found = _FUNCTIONS[name]
    return found(optimizer) if name in ("state", "counts") else partial(found, optimizer)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "state": state,
    "counts": counts,
    "state_dict": state_dict,
    "load_state_dict": load_state_dict,
    "refresh": refresh,
}
