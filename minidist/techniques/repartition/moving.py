"""The state of a job moves from one layout to another: weights, optimizer state, running statistics, techniques'.

What a rank holds is a list of named ranges (`parallel/redistribute.py`), before and after; of ZeRO's optimizer state
it is the elements of its shard. Gradients do not move: they are used up.

A layout is known here only by its data axes, so it may be any strategy of `job/train/strategies`.

Proved by: tests/techniques/test_repartition.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array, is_half
from minidist.core.comm import Comm
from minidist.parallel.redistribute import Piece, lacking_bytes, redistribute

Shards = dict[str, list[Any]]  # what a technique keeps next to the weights of a data axis, by kind
State = dict[str, dict[str, Array]]  # of an optimizer: {parameter: {key: array}}


def move_state(comm: Comm, before: Any, after: Any, done: int, stride: int) -> tuple[int, int]:
    """Fill the layout `after` with the state of `before`, that of `done` steps. Every rank calls it.

    stride: see `redistribute`. Returns how many ranges all ranks told each other, and how many bytes this rank needed
    and did not have.
    """
    # [1] Room for what this rank will have, and what it has.
    states = [_empty_state(axis) if before.step_count else {} for axis in after.data_axes]
    extensions = after.job.extensions
    kept = [[_empty(extension.shards_after(axis, done)) for extension in extensions] for axis in after.data_axes]
    buffers = [(name, xp.empty(array.shape, array.dtype)) for name, array, _ in after.buffers()]
    held = [[extension.shards(axis) for extension in extensions] for axis in before.data_axes]
    have = _pieces(before, held, before.buffers(), [axis.optimizer.state for axis in before.data_axes])
    need = _pieces(after, kept, buffers, states)

    # [2] From the ranks that had it to those that have it now.
    lacking = lacking_bytes(have, need)
    ranges = redistribute(comm, have, need, stride)

    # [3] As after a resume: optimizers take their state over, and everyone learns that the weights have changed.
    for axis, found, own in zip(after.data_axes, states, kept, strict=True):
        for extension, shards in zip(extensions, own, strict=True):
            extension.load_shards(axis, shards)
        axis.optimizer.load_state_dict({"step": before.step_count, "state": found})
        axis.updated()
        axis.optimizer.refresh()
    after.updates = before.step_count
    after.job.model.load_state_dict(dict(buffers), strict=False)
    return ranges, lacking


def _pieces(
    strategy: Any, kept: Sequence[Sequence[Shards]], buffers: Sequence[tuple[Any, ...]], states: Sequence[State]
) -> list[Piece]:
    """Return weights, what techniques keep next to them, running statistics and optimizer state of a rank.

    kept: of each data axis, what each technique keeps. states: of each data axis.
    """
    result = []
    for axis, own, state in zip(strategy.data_axes, kept, states, strict=True):
        for kind, shards in (("weights", axis.weights()), *(pair for kinds in own for pair in kinds.items())):
            result += [_piece(strategy, axis, kind, s.parameter.name, s.start, s.stop, s.values) for s in shards]
        for p, start, stop in axis.state_ranges():
            for key, array in state.get(p.name, {}).items():
                result.append(_piece(strategy, axis, f"optimizer/{key}", p.name, start, stop, array))
    for name, array, *_ in buffers:
        values = array.reshape(-1)
        result.append(Piece(f"buffers/{name}", 0, values.size, values))
    return result


def _empty_state(axis: Any) -> State:
    """Return new arrays for the optimizer state of a data axis, to be filled."""
    result: State = {}
    for p, start, stop in axis.state_ranges():
        dtype = xp.dtype(xp.float32) if is_half(p.dtype) else p.dtype
        if names := axis.optimizer.state_names(p.dtype, p.name):
            result[p.name] = {name: xp.empty(stop - start, dtype) for name in names}
    return result


def _piece(strategy: Any, axis: Any, kind: str, name: str, start: int, stop: int, values: Array) -> Piece:
    """Return elements of a parameter, or of what belongs to it; ranks of the other axes hold other shards of it."""
    place = f"tp {strategy.axes.tp.rank}" + (f" ep {strategy.axes.ep.rank}" if axis.experts else "")
    return Piece(f"{kind}/{name} of {place}", start, stop, values)


def _empty(expected: Mapping[str, tuple[str, Sequence[Any]]]) -> Shards:
    """Return arrays for the shards that a technique expects (`Extension.shards_after`), to be filled."""
    return {
        kind: [shard._replace(values=xp.empty(shard.stop - shard.start, dtype)) for shard in shards]
        for kind, (dtype, shards) in expected.items()
    }
