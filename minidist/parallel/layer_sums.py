"""The norms of whole layers, although each rank has shards of them: for the trust ratios of LARS and LAMB.

    rank 0   | layer a | layer b ..|               each rank: sums of squares of what it holds, 0 where it holds nothing
    rank 1   |.. layer b | layer c |  ── all-reduce of one table, all layers ──▶   every rank: those of whole layers

The sums are whole numbers (`optim.exact_sums`), so the order of the all-reduce does not matter and a cut changes no
bit. A ratio of a rank's own shard is a known mistake: each rank would step its part of one layer by another rate.

Proved by: tests/parallel/test_layer_sums.py
"""

from collections.abc import Iterable

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.optim.exact_sums import LIMBS
from minidist.optim.layerwise import Sums

new_purpose("trust_ratio")


class LayerSums:
    """Adds squares over the ranks that hold parts of a layer; the `layer_sums` of LARS and LAMB.

        optimizer = LAMB(sharded_parameters(model), lr=1e-3, layer_sums=LayerSums(model.parameters(), shards=comm))

    parameters: the layers, on every rank in the same order; frozen ones are left out. shards: the ranks over which
    elements are sharded (ZeRO, FSDP; of a hybrid mesh the second axis). axes: communicators by the names of the
    parameters' layouts, such as tp=comm; a parameter that an axis does not shard is counted on its first rank.

    A call sends, for each communicator of n > 1 ranks, one all-reduce of 2 x 18 numbers of 8 B per layer (purpose
    `trust_ratio`): 2 (n-1)/n of 288 B per layer leave a rank.
    """

    def __init__(self, parameters: Iterable[Parameter], shards: Comm | None = None, **axes: Comm) -> None:
        self.parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        self.axes = axes
        self.comms = [comm for comm in (shards, *axes.values()) if comm is not None and comm.size > 1]

    def __call__(self, sums: Sums) -> Sums:
        """Return the sums of whole layers; `sums` has those of this rank's elements, by name."""
        if not self.comms:
            return sums

        # One row per layer, zeros where this rank has none of it or is not the one that counts it.
        table = np.zeros((len(self.parameters), 2, LIMBS))
        for row, parameter in zip(table, self.parameters, strict=True):
            if parameter.name in sums and self._counts(parameter):
                row[...] = sums[parameter.name]

        for comm in self.comms:
            with purpose("trust_ratio"):
                all_reduce(comm, table)
        return {parameter.name: row for parameter, row in zip(self.parameters, table, strict=True)}

    def _counts(self, parameter: Parameter) -> bool:
        """Return whether this rank is the first of those that hold the same elements, on every axis of a layout."""
        layout = parameter.layout
        for name, comm in self.axes.items():
            same = layout.copies if layout is not None and name in layout.axes else comm.size
            if comm.rank % same:
                return False
        return True


def layer_sums_volume(layers: int, ranks: int) -> int:
    """Return the numbers (of 8 B) that all `ranks` of one communicator together send in one step."""
    return 2 * (ranks - 1) * layers * 2 * LIMBS
