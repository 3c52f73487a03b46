"""What a rank holds of the weights of a replica that trains alone: all of them, or shards (ZeRO 1 to 3).

    replica 0   rank 0 | a0 |      rank 1 | a1 |        the ranks of a replica share its weights: one shard each
    replica 1   rank 2 | b0 |      rank 3 | b1 |
                         └ meet ┘    └ meet ┘           averages and outer steps treat every element by itself, so only
                                                        ranks with the same shard of their replicas meet

Proved by: tests/techniques/test_sharded_replicas.py, tests/techniques/test_averaging.py
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import FlatSlice, flat_slices
from minidist.core.parallel.zero import Shard

Part = FlatParameters | Shard  # has `data`, 1-D, and `updated()`


def parts_of(weights: Part | Iterable[Part]) -> list[Part]:
    """Return the flat arrays or the shards that are given: one, or several, such as `shards_of(model)`."""
    return [weights] if isinstance(weights, FlatParameters | Shard) else list(weights)


def flat_of(part: Part) -> FlatParameters:
    """Return the part itself, or the flat parameters that it is a shard of."""
    return part.flat if isinstance(part, Shard) else part


def place_of(part: Part, parameter: Parameter) -> slice:
    """Return where the elements of a parameter lie in `part.data`; a shard may have none of them."""
    whole = flat_of(part).slice_of(parameter)
    return part.place(whole) if isinstance(part, Shard) else whole


def slices_in(part: Part, source: Any) -> list[FlatSlice]:
    """Return the trainable elements of a part for an optimizer whose data and gradient are in `source`, not in it."""
    if isinstance(part, Shard):
        return [replace(piece, source=source) for piece in part.slices()]
    return flat_slices(part, source=source)


def trainable(parts: Iterable[Part]) -> Iterator[tuple[Part, Parameter]]:
    """Yield each trainable parameter of the parts, with its part."""
    for part in parts:
        for parameter in flat_of(part).parameters:
            if parameter.requires_grad:
                yield part, parameter
