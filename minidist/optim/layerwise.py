"""Optimizers with a learning rate for each layer: the ratio of the norm of its weights to the norm of its update.

With batches of thousands of samples one learning rate does not fit all layers: a step that is right for one is larger
than the weights of another. LARS and LAMB multiply the rate by a trust ratio, layer by layer. A layer is a parameter
here, as in the authors' programs. The ratio needs two norms over the whole layer, so an element's update is no longer a
function of that element alone: on shards, ranks must add what they have. A step therefore has two passes:

    [1] every layer     squares of the weights and of the update that this rank holds
    [2] all layers      added over the ranks, in one message (`parallel.layer_sums`; nothing on one device)
    [3] every layer     weights -= lr * ratio * update

The sums of [1] and [2] are exact (`exact_sums`), so a layer that is cut anywhere has the ratio of the whole one, bit
for bit, and so has everything that follows.

Proved by: tests/optim/test_layerwise.py
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.optim.optimizer import FlatSlice, Group, Optimizer, State
from minidist.optim.exact_sums import LIMBS, square_sum, value_of

Sums = dict[str, np.ndarray]  # layer -> (2, LIMBS): of its weights and of its update


class LayerwiseOptimizer(Optimizer):
    """Base class of LARS and LAMB; a subclass defines `measured`, `trust_ratio` and `update`, whose `lr` has the ratio.

    layer_sums: adds the sums of all layers over the ranks that hold parts of them. Raises UsageError when parameters
    are shards and there is none: every rank would take a different ratio, and one layer would be stepped by several.
    """

    joins = False

    def __init__(
        self,
        parameters: Any,
        lr: float,
        weight_decay: float = 0.0,
        groups: Iterable[Group] = (),
        layer_sums: Callable[[Sums], Sums] | None = None,
    ) -> None:
        super().__init__(parameters, lr, weight_decay, groups)
        self.layer_sums = layer_sums
        for run in self._runs:
            if layer_sums is None and is_shard(run.slice):
                raise UsageError(
                    f"{type(self).__name__} needs the norm of the whole of {run.pieces[0][0]!r}, and this rank has a"
                    " shard of it; pass layer_sums=LayerSums(model.parameters(), shards=comm) of"
                    " minidist.parallel.layer_sums, or tp=comm for tensor parallelism"
                )

    def measured(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], decay: float, count: int
    ) -> xp.Array:
        """Take one block of the gradient into the state and return the block of what the second norm is of."""
        raise NotImplementedError

    def trust_ratio(self, weights: float, update: float, decay: float) -> float:
        """Return what multiplies a layer's learning rate; weights, update: the two norms, neither of them 0."""
        raise NotImplementedError

    def _step_runs(self, runs: list[Any]) -> None:
        # [1] The squares of this rank's elements, block by block.
        sums: Sums = {}
        for run in runs:
            own = sums[run.pieces[0][0]] = np.zeros((2, LIMBS))
            self._each_block(run, self._measure(own))

        # [2] The squares of whole layers: one message for all of them.
        if self.layer_sums is not None:
            sums = self.layer_sums(sums)

        # [3] A layer whose weights or update are all zero has the plain learning rate, as in the authors' programs.
        for run in runs:
            weights, update = (math.sqrt(value_of(limbs)) for limbs in sums[run.pieces[0][0]])
            ratio = 1.0 if weights == 0 or update == 0 else self.trust_ratio(weights, update, self._decay_of(run))
            self._each_block(run, self.update, ratio)

    def _measure(self, sums: np.ndarray) -> Callable[..., None]:
        """Return the function of a block that adds its squares to `sums`."""

        def measure(
            data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
        ) -> None:
            sums[0] += square_sum(data)
            sums[1] += square_sum(self.measured(data, grad, state, work, decay, count))

        return measure


def is_shard(piece: Any) -> bool:
    """Return whether other ranks hold the rest of a slice's parameter: over a data axis, or by its layout."""
    if not isinstance(piece, FlatSlice):
        layout = getattr(piece, "layout", None)
        return layout is not None and bool(layout.axes)
    comm, flat = getattr(piece.source, "comm", None), getattr(piece.source, "flat", piece.source)
    layouts = [getattr(p, "layout", None) for p in getattr(flat, "parameters", ()) if p.name == piece.name]
    return (comm is not None and comm.size > 1) or any(layout is not None and layout.axes for layout in layouts)
