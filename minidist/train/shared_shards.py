"""What stages share, when the gradients are sharded already (ZeRO 2 and 3): each rank adds up its own shard of every copy.

    stage 0   data rank 0  | shard 0 |  ◀──▶  | shard 0 |  data rank 0   stage 3
              data rank 1  | shard 1 |  ◀──▶  | shard 1 |  data rank 1                each sends 1/n of the tied weight

That needs copies that are cut alike, so a tied weight is a unit of its own on both stages. Without sharding the copies meet
first, whole, and are summed over the data axis then (`pipeline.runtime.shared`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidist.base.trace import purpose
from minidist.parallel import Shard
from minidist.pipeline.runtime.shared import Group, SharedGradients, Site


class SharedShards:
    """Takes the place of `SharedGradients` in a pipeline. shards: this rank's, by stage."""

    def __init__(self, shared: SharedGradients, shards: Mapping[int, Sequence[Shard]]) -> None:
        self.comm, self.groups, self.stages, self.copies, self.shards = shared.comm, shared.groups, shared.stages, shared.copies, shards

    def add(self) -> None:
        """Make every copy's shard the sum over all places: the ranks of a stage in rank order, then the stages."""
        for group in self.groups:
            own = [site for site in group.sites if site[1] == self.comm.rank]
            if own:
                with purpose("tied" if group.tied else "gradient_reduce"):
                    self._add(group, own)

    def mark_added(self) -> None:
        """Shards hold nothing but sums."""

    def _units(self, stage: int, group: Group) -> list[Shard]:
        return [shard for shard in self.shards[stage] if set(shard.flat.names) <= set(group.names)]

    def _add(self, group: Group, own: list[Site]) -> None:
        comm = self.comm
        sums: dict[Site, Any] = {
            site: np.concatenate([shard.grad_buffer() for shard in self._units(site[0], group)]) for site in own
        }
        like, requests = sums[own[0]], []
        for tag, site in enumerate(group.sites):
            if site not in sums:
                sums[site] = np.empty_like(like)
                requests.append(comm.irecv(sums[site], site[1], tag))
        for tag, site in enumerate(group.sites):
            if site[1] == comm.rank:
                others = sorted({rank for _, rank in group.sites} - {comm.rank})
                requests += [comm.isend(sums[site], rank, tag) for rank in others]
        comm.waitall(requests)
        total: Any = None
        for stage in sorted({stage for stage, _ in group.sites}):
            of_stage: Any = None
            for site in sorted(site for site in group.sites if site[0] == stage):
                of_stage = sums[site] if of_stage is None else of_stage + sums[site]
            total = of_stage if total is None else total + of_stage
        for stage, _ in own:
            start = 0
            for shard in self._units(stage, group):
                shard.grad_buffer()[...] = total[start : start + shard.size]
                start += shard.size
