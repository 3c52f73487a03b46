"""Whole gradients, weights and optimizer state of a sharded model, by name: for comparisons and checkpoints.

Proved by: tests/parallel/test_zero.py, tests/parallel/test_fully_shard.py
"""

from collections.abc import Sequence

from minidist.base.half import is_half
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.optim import Optimizer
from minidist.core.parallel.zero import Shard


def gather_tensors(shards: Sequence[Shard], optimizer: Optimizer) -> dict[str, dict[str, xp.Array]]:
    """Return {"gradients": {name: array}, "weights": ..., "optimizer": {name.key: 1-D array}}, whole, on every rank.

    For comparisons, not for training: it gathers every unit several times (purpose `metrics`).
    """
    result: dict[str, dict[str, xp.Array]] = {"gradients": {}, "weights": {}, "optimizer": {}}
    with purpose("metrics"):
        for shard in shards:
            # Weights, gradients and each kind of optimizer state of the unit, as one flat array each ...
            flat = shard.flat
            weights = all_gather(shard.comm, shard.data)
            gradients = all_gather(
                shard.comm, shard.grad_buffer() if shard.filled else xp.zeros(shard.size, shard.dtype, shard.data)
            )
            names = {p.name: optimizer.state_names(shard.dtype, p.name) for p in flat.parameters if p.requires_grad}
            states = {}
            for key in dict.fromkeys(key for own in names.values() for key in own) if optimizer.step_count else ():
                states[key] = all_gather(shard.comm, _flat_state(shard, optimizer, key))

            # ... and then cut into parameters.
            for parameter, name in zip(flat.parameters, flat.names, strict=True):
                place = flat.slice_of(parameter)
                result["weights"][name] = weights[place].reshape(parameter.shape)
                if parameter.requires_grad:
                    result["gradients"][name] = gradients[place].reshape(parameter.shape)
                    for key in names[name] if states else ():
                        result["optimizer"][f"{name}.{key}"] = states[key][place]
    return result


def _flat_state(shard: Shard, optimizer: Optimizer, key: str) -> xp.Array:
    """Return one kind of optimizer state of the shard as one array; elements that have none are zero."""
    state, dtype = optimizer.state, shard.dtype
    # State is float32 also where values are in half precision.
    whole = xp.zeros(shard.size, xp.float32 if is_half(dtype) else dtype)
    for piece in shard.slices():
        if key in state.get(piece.name, {}):
            whole[piece.start : piece.stop] = state[piece.name][key]
    return whole
