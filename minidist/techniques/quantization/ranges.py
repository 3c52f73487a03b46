"""The ranges of quantised inputs, agreed over the ranks: every rank rounds to the same grid, that of the whole batch.

    rank 0   rows 0..3: layer 0 in [-1.0, 2.5] ──┐  all-reduce (maximum) of
    rank 1   rows 4..7: layer 0 in [-3.0, 2.0] ──┴─ (-smallest, largest) of all layers ──▶ [-3.0, 2.5] on both

Without it every rank has the range of its rows alone, and so a separate model, which no single device would train. A
maximum is exact and has no order, so the grid has the same bits on any number of ranks. Weights need no agreement: all
replicas have the same ones.

Proved by: tests/techniques/test_quantized_ranges.py
"""

from collections.abc import Mapping

import numpy as np

from minidist.collectives.closed_forms import volume
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.techniques.quantization.layers import MinMaxObserver


def update_ranges(observers: Mapping[str, MinMaxObserver], comm: Comm | None = None) -> None:
    """End a step: every observer's range takes in what all ranks saw since the last call. All ranks call it.

    observers: those of the model (`layers.observers_of`), in the same order on all ranks; a layer that no rank
    ran keeps its range. comm: the ranks with other rows of the same batch; None on one device.

    An all-reduce (maximum) of two numbers per layer by recursive doubling, purpose `quantization_range`.
    """
    if not observers:
        return
    # The smallest values negated, so that one maximum serves both; -inf where this rank saw nothing.
    unseen = (xp.inf, -xp.inf)
    rows = [(float(-low), float(high)) for low, high in (observer.seen or unseen for observer in observers.values())]
    table = np.array(rows, next(iter(observers.values())).dtype)
    if comm is not None and comm.size > 1:
        with purpose("quantization_range"):
            all_reduce(comm, table.reshape(-1), "max", algorithm="recursive_doubling")

    for observer, (minus_low, high) in zip(observers.values(), table, strict=True):
        observer.seen = None
        if high > -xp.inf:
            observer.update(-minus_low, high)


def ranges_volume(layers: int, ranks: int) -> int:
    """Return the elements that all `ranks` together send in one `update_ranges`."""
    return doubling_volume(2 * layers, ranks)


def doubling_volume(numbers: int, ranks: int) -> int:
    """Return the elements that all `ranks` together send in one all-reduce of `numbers` by recursive doubling."""
    if ranks == 1 or not numbers:
        return 0
    return sum(volume("all_reduce", "recursive_doubling", numbers, ranks, rank).elements for rank in range(ranks))
