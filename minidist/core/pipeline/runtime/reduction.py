"""Who sums the gradients of a rank's stages: first the places of a shared parameter, then the replicas of a stage.

    stage 0  rank 0   wte ──┐                                 rank 0 of the other pipelines: replicas of stage 0
                            ├─ [1] both add ──▶ [2] all-reduce over the data axis ──▶ gradient
    stage 3  rank 3   wte ──┘                                 rank 3 of the other pipelines: replicas of stage 3

Parameters have copies in more than one place: tied embeddings on two stages, and whole stages in DualPipe. Every place
sends its sum to the other places' ranks, and every rank adds in the same order: the ranks of a stage in rank order,
then the stages in stage order. So the copies stay equal bit for bit. Volume: with n places each sends its bytes n-1
times, which for n = 2 is an all-reduce's volume. A stage without shared parameters needs no [1]: its sum over the
replicas starts when its last backward has run (REDUCE_GRAD in the plan), behind the computations that follow.

Where gradients are sharded already (ZeRO 2 and 3), [2] comes first, and each rank then adds its own shard of every
replica. For this a tied weight is a separate unit on both stages, which are cut in the same way:

    stage 0   data rank 0  | shard 0 |  ◀──▶  | shard 0 |  data rank 0   stage 3
              data rank 1  | shard 1 |  ◀──▶  | shard 1 |  data rank 1                each sends 1/n of the tied weight

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py, tests/train/test_pipelines.py
"""

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import add, itemgetter
from typing import Any, NamedTuple

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.layout import cut
from minidist.core.base.random import fingerprint, fingerprint_number
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm, PointToPoint
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.core.parallel.zero import Shard
from minidist.core.pipeline.runtime.stages import PipelineStage

Place = tuple[int, int]  # stage, rank
Row = list[int]  # rank, stage, name, two numbers of its values
ROW = 4  # numbers that a rank tells of a parameter: stage, name, two of its values


class Reduction:
    """Sums the gradients of one pipeline's stages over their places, and over the replicas that `data` connects.

    data: communicator of the data axis; None: there is one pipeline. algorithm: of the all-reduce.
    reducers: those of each stage, when the caller (ZeRO) has made them. each: they reduce in the backward of every
    micro-batch (ZeRO 2), not once at the end. shards: those of each stage, where gradients are sharded (ZeRO 2 and 3).
    """

    def __init__(
        self,
        data: Comm | None = None,
        algorithm: str = "ring",
        *,
        reducers: Mapping[int, Sequence[GradientReducer]] | None = None,
        each: bool = False,
        shards: Mapping[int, Sequence[Shard]] | None = None,
    ) -> None:
        self.data, self.algorithm, self.given, self.each, self.shards = data, algorithm, reducers, each, shards

    def bind(self, comm: Comm, stages: Mapping[int, PipelineStage], tied: Sequence[str]) -> None:
        """Make what sums the gradients of these stages. Every rank of the pipeline calls it: it sends (startup)."""
        parameters = {n: stage.parameters for n, stage in stages.items()}
        self.shared = SharedGradients(comm.dup(), parameters, tied, self.shards)
        self.reducers = self.given or {}
        if self.given is None and self.data is not None and self.data.size > 1:
            self.reducers = hooks.replica_reducers(stages, self.data, self.algorithm)
        # Shared parameters are summed over their places first, at the end of the step.
        self.early = set() if self.each else {n for n in self.reducers if n not in self.shared.stages}

    def finish(self) -> None:
        """End a step: sum shared parameters over their places, then everything over the replicas."""
        if self.shared.groups:
            self.shared.add()
        if not self.each:
            for stage in self.reducers:
                if stage not in self.early:
                    self.start(stage)
            for reducers in self.reducers.values():
                for reducer in reducers:
                    reducer.finish()
        if self.shared.groups:
            self.shared.mark_added()

    def start(self, stage: int) -> None:
        """Start the sum over the data axis of a complete stage: all buckets, in order."""
        for reducer in self.reducers[stage]:
            for parameter in reversed(reducer.flat.parameters):
                if parameter.requires_grad and (parameter.grad is not None or reducer.unused == "error"):
                    parameter.zero_fill()  # when nothing was added to it
                    reducer.ready(parameter)


class Group(NamedTuple):
    """Parameters with the same places."""

    places: Sequence[Place]
    names: list[str]
    tied: bool


class SharedGradients:
    """[1] Finds the shared parameters of all stages and adds their gradients, or this rank's shards of these.

    groups: the shared parameters that this rank has. stages: those with any of them. copies: (stage, rank, name) of
    every place but a parameter's first, which a norm must not count again.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[int, Sequence[Parameter]],
        tied: Sequence[str],
        shards: Mapping[int, Sequence[Shard]] | None = None,
    ) -> None:
        # Every rank tells every other which parameters it has, by a digest of name and values.
        self.comm, self.shards = comm, shards
        self.mine = {(stage, p.name): p for stage, ps in parameters.items() for p in ps if p.requires_grad}
        names = {word_of(name): name for _, name in self.mine}
        rows = [[stage, word_of(name), *digest_of(parameter)] for (stage, name), parameter in self.mine.items()]
        table = _gather_rows(comm, np.array(rows, np.int64).reshape(-1, ROW))
        hooks.pipeline_refusals().check_shared(comm.rank, parameters, table, tied)
        self.groups = _groups(table, {word_of(name) for name in tied}, names)
        self.stages = {stage for group in self.groups for stage, _ in group.places}
        self.copies = {place + (name,) for group in self.groups for place in group.places[1:] for name in group.names}

    def add(self) -> None:
        """Make every copy's gradient the sum over all places."""
        for group in self.groups:
            own = {place: self._gradients(place[0], group) for place in group.places if place[1] == self.comm.rank}
            if not own:
                continue
            flats = [self.mine[stage, group.names[0]].flat for stage, _ in own]
            matching = hooks.pipeline_refusals().matching(self.comm, group.names[0], flats)
            sums = {place: xp.concatenate([array.reshape(-1) for array in found]) for place, found in own.items()}
            with purpose("tied" if group.tied else "gradient_reduce"):
                total = sum_over_places(matching or self.comm, group, sums)
            for found in own.values():
                for array, part in zip(found, cut(total, [array.size for array in found]), strict=True):
                    array[...] = part.reshape(array.shape)

    def mark_added(self) -> None:
        """Mark the sums as reduced: a second step without `zero_grad` sets them aside and sums only what is new."""
        for group in self.groups if self.shards is None else ():  # a shard holds only sums
            for stage, rank in group.places:
                if rank == self.comm.rank:
                    for name in group.names:
                        self.mine[stage, name].gradient.was_reduced()

    def _gradients(self, stage: int, group: Group) -> list[Any]:
        """Return the arrays of a group's gradients on this rank's stage, in an order that all places have."""
        if self.shards is not None:
            return [shard.grad_buffer() for shard in self.shards[stage] if set(shard.flat.names) <= set(group.names)]
        parameters = [self.mine[stage, name] for name in group.names]
        for parameter in parameters:
            parameter.zero_fill()  # when nothing was added to it
        return [parameter.gradient.local for parameter in parameters]


def sum_over_places(comm: PointToPoint, group: Group, sums: Mapping[Place, Any]) -> Any:
    """Return the sum of the 1-D arrays of all places of a group: a stage's ranks in rank order, then the stages.

    sums: those of this rank's places. Each place's array goes to every other rank of the group.
    """
    requests, by_place, like = [], dict(sums), next(iter(sums.values()))
    others = sorted({rank for _, rank in group.places} - {comm.rank})
    for tag, place in enumerate(group.places):
        if place not in sums:
            by_place[place] = xp.empty_like(like)
            requests.append(comm.irecv(by_place[place], place[1], tag))
    for tag, place in enumerate(group.places):
        if place in sums:
            requests += [comm.isend(sums[place], rank, tag) for rank in others]
    comm.waitall(requests)

    # Of a stage first, then of all; the places are in this order.
    stages = groupby(group.places, itemgetter(0))
    return reduce(add, [reduce(add, map(by_place.__getitem__, places)) for _, places in stages])


def _groups(table: Sequence[Row], tied: Collection[int], names: Mapping[int, str]) -> list[Group]:
    """Return this rank's parameters with several places: those of the same places together, the tied ones first.

    A parameter is the same one where its name is tied, or where its stage is computed by several ranks.
    """
    where: dict[tuple[int, int], list[Place]] = {}  # by stage (-1: tied) and word
    for holder, stage, word, *_ in table:
        where.setdefault((-1 if word in tied else stage, word), []).append((stage, holder))
    groups: dict[tuple[bool, tuple[Place, ...]], list[str]] = {}
    for (stage, word), places in sorted(where.items(), key=lambda item: item[0][0]):
        if len(places) > 1 and word in names:
            groups.setdefault((stage < 0, tuple(sorted(places))), []).append(names[word])
    return [Group(places, found, is_tied) for (is_tied, places), found in groups.items()]


def word_of(name: str) -> int:
    """Return a name as a number that can be sent."""
    return fingerprint_number(name, np.int64)


def digest_of(parameter: Parameter) -> list[int]:
    """Return two numbers of shape and values."""
    here = parameter.flat is None or not parameter.flat.released  # ZeRO 3 has shards, which are not compared
    values = parameter.data.tobytes() if here else b""
    return fingerprint(repr(parameter.shape).encode() + values).view(np.int64).tolist()  # type: ignore[no-any-return]


def _gather_rows(comm: Comm, rows: Any) -> list[list[int]]:
    """Return the rows of all ranks, each behind its rank's number: two all-gathers, of the counts and of the rows."""
    with purpose("startup"):
        counts = np.asarray(all_gather(comm, np.array([len(rows)]))).tolist()
        flat = np.asarray(all_gather(comm, rows.reshape(-1), counts=[ROW * count for count in counts]))
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return [[rank, *row] for rank, row in zip(ranks, flat.reshape(-1, ROW).tolist(), strict=True)]
