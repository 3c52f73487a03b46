"""What stages share, when the gradients are sharded already (ZeRO 2 and 3): each rank adds up its own shard of every
copy.

    stage 0   data rank 0  | shard 0 |  ◀──▶  | shard 0 |  data rank 0   stage 3
              data rank 1  | shard 1 |  ◀──▶  | shard 1 |  data rank 1                each sends 1/n of the tied weight

That needs copies that are cut alike, so a tied weight is a unit of its own on both stages. Without sharding the copies
meet first, whole, and are summed over the data axis then (`pipeline.runtime.shared`).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from minidist.parallel import Shard
from minidist.pipeline.runtime.shared import Group, SharedGradients, Site, sum_over_places


class SharedShards(SharedGradients):
    """Takes the place of `shared` in a pipeline: who shares what is the same, what is added is shards. shards: this
    rank's, by stage.
    """

    def __init__(self, shared: SharedGradients, shards: Mapping[int, Sequence[Shard]]) -> None:
        self.comm, self.groups, self.stages, self.copies, self.shards = (
            shared.comm,
            shared.groups,
            shared.stages,
            shared.copies,
            shards,
        )

    def mark_added(self) -> None:
        """Shards hold nothing but sums."""

    def _units(self, stage: int, group: Group) -> list[Shard]:
        return [shard for shard in self.shards[stage] if set(shard.flat.names) <= set(group.names)]

    def _add(self, group: Group, own: list[Site]) -> None:
        sums = {site: np.concatenate([shard.grad_buffer() for shard in self._units(site[0], group)]) for site in own}
        total = sum_over_places(self.comm, group, sums)
        for stage, _ in own:
            start = 0
            for shard in self._units(stage, group):
                shard.grad_buffer()[...] = total[start : start + shard.size]
                start += shard.size
