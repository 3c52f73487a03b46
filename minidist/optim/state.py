"""Load the state of an optimizer: what `optimizer.load_state_dict(saved)` does.

Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.base import arrays as xp
from minidist.core.base.errors import UsageError, nearest
from minidist.core.base.limits import check_whole
from minidist.optim.runs import cut_run


def load_state_dict(optimizer: Any, saved: dict[str, Any]) -> None:
    """Copy a `state_dict` of the same slices into `optimizer`. See `Optimizer.load_state_dict`."""
    count = check_whole("step", saved["step"])
    counts = {name: check_whole(f"counts[{name!r}]", n) for name, n in saved.get("counts", {}).items()}
    # A state of an unknown parameter is a mistake of the caller; silence would lose it.
    states = saved["state"]
    names = [name for run in optimizer._runs for name, _, _ in run.pieces]
    for name in (*states, *counts):
        if name not in names:
            raise UsageError(f"optimizer state of {name!r}: no such parameter here{nearest(name, names)}")

    optimizer._runs = [
        part for run in optimizer._runs for part in cut_run(run, [counts.get(name, count) for name, _, _ in run.pieces])
    ]
    for run in optimizer._runs:
        have = [name in states for name, _, _ in run.pieces]
        run.state, first = None, run.pieces[0][0]
        run.count = counts.get(first, count)
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
