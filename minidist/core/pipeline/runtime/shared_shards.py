"""What stages share when gradients are sharded already (ZeRO 2 and 3): each rank adds its own shard of every replica.

    stage 0   data rank 0  | shard 0 |  ◀──▶  | shard 0 |  data rank 0   stage 3
              data rank 1  | shard 1 |  ◀──▶  | shard 1 |  data rank 1                each sends 1/n of the tied weight

That needs replicas that are cut the same way, so a tied weight is a separate unit on both stages. Without sharding
the replicas are summed first, whole, and over the data axis afterwards (`shared.py`).

Proved by: tests/train/test_pipelines.py
"""

from collections.abc import Mapping, Sequence

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.comm import Comm
from minidist.core.parallel.flat_shards import Shard
from minidist.core.pipeline.runtime.shared import Group, Place, SharedGradients, sum_over_places


class SharedShards(SharedGradients):
    """Finds the shared parameters as `SharedGradients` does, and adds shards; shards: this rank's, by stage."""

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[int, Sequence[Parameter]],
        tied: Sequence[str],
        shards: Mapping[int, Sequence[Shard]],
    ) -> None:
        super().__init__(comm, parameters, tied)
        self.shards = shards

    def mark_added(self) -> None:
        """Do nothing: a shard holds only sums."""

    def _units(self, stage: int, group: Group) -> list[Shard]:
        return [shard for shard in self.shards[stage] if set(shard.flat.names) <= set(group.names)]

    def _add(self, group: Group, own: list[Place]) -> None:
        sums = {place: xp.concatenate([shard.grad_buffer() for shard in self._units(place[0], group)]) for place in own}
        total = sum_over_places(self._matching(group, own), group, sums)
        for stage, _ in own:
            start = 0
            for shard in self._units(stage, group):
                shard.grad_buffer()[...] = total[start : start + shard.size]
                start += shard.size
