"""Parameters that live in more than one place: tied embeddings on two stages, and whole stages in DualPipe.

    stage 0, rank 0   wte   gradient of the embedding ─┐
                                                       ├─ both ranks add: stage 0's sum, then stage 3's
    stage 3, rank 3   wte   gradient of the head ──────┘

Every place sends its sum to the other places' ranks, and everybody adds in the same order: the ranks of a stage in rank
order, then the stages in stage order. So the copies stay equal bit for bit. This comes before any reduction over the
data axis.
Volume: with n places each sends its bytes n-1 times, which for n = 2 is an all-reduce's volume.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base.errors import MismatchError, UsageError, nearest
from minidist.base.fingerprint import fingerprint, fingerprint_number
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.comm import Comm

Site = tuple[int, int]  # stage, rank
ROW = 4  # numbers that a rank tells of a parameter: stage, name, two of its values


@dataclass
class Group:
    """Parameters with the same places."""

    sites: list[Site]
    names: list[str]
    tied: bool


class SharedGradients:
    """Finds the shared parameters of all stages and adds their gradients."""

    def __init__(self, comm: Comm, parameters: Mapping[int, Sequence[Parameter]], tied: Sequence[str]) -> None:
        self.comm = comm
        self.mine = {(stage, p.name): p for stage, ps in parameters.items() for p in ps if p.requires_grad}
        words = {_word(name): name for _, name in self.mine}
        known = {name for _, name in self.mine}
        rows = [[stage, _word(name), *_digest(parameter)] for (stage, name), parameter in self.mine.items()]
        table = _tell_everybody(comm, np.array(rows, np.int64).reshape(-1, ROW))
        everywhere = {row[2] for row in table}
        for name in tied:
            if _word(name) not in everywhere:
                raise UsageError(
                    f"tied parameter {name!r} is on no stage{nearest(name, known)}; name one of the stages' parameters"
                )
        tied_words = {_word(name) for name in tied}
        where: dict[tuple[int | None, int], list[Site]] = {}
        values: dict[tuple[int | None, int], Any] = {}
        for rank, stage, word, *digest in table:
            key = (None if word in tied_words else stage, word)
            where.setdefault(key, []).append((stage, rank))
            if values.setdefault(key, digest) != digest:
                raise MismatchError(
                    f"rank {comm.rank}: the copies of parameter {words.get(word, 'of another rank')!r} differ between "
                    f"{_places(where[key])}; build every copy from the same seed"
                )
        groups: dict[tuple[bool, tuple[Site, ...]], list[str]] = {}
        for (stage_, word), sites in sorted(
            where.items(), key=lambda entry: (entry[0][0] is not None, entry[0][0] or 0)
        ):
            if len(sites) > 1 and word in words:
                groups.setdefault((stage_ is None, tuple(sorted(sites))), []).append(words[word])
        self.groups = [Group(list(sites), names, is_tied) for (is_tied, sites), names in groups.items()]
        self.stages = {stage for group in self.groups for stage, _ in group.sites}
        self.copies = {site + (name,) for group in self.groups for site in group.sites[1:] for name in group.names}

    def add(self) -> None:
        """Make every copy's gradient the sum over all places."""
        for group in self.groups:
            own = [site for site in group.sites if site[1] == self.comm.rank]
            if own:
                with purpose("tied" if group.tied else "gradient_reduce"):
                    self._add(group, own)

    def mark_added(self) -> None:
        """The sums over the places are whole: a second step without `zero_grad` sets them aside and sums only what is
        new.
        """
        for group in self.groups:
            for stage, rank in group.sites:
                if rank == self.comm.rank:
                    for name in group.names:
                        self.mine[stage, name].gradient.was_reduced()

    def _add(self, group: Group, own: list[Site]) -> None:
        comm, first = self.comm, [self.mine[own[0][0], name] for name in group.names]
        sums: dict[Site, Any] = {
            site: np.concatenate([_gradient(self.mine[site[0], name]) for name in group.names]) for site in own
        }
        total = sum_over_places(comm, group, sums)
        at = 0
        for name, parameter in zip(group.names, first, strict=True):
            for stage, _ in own:
                copy = self.mine[stage, name]
                copy.gradient.local[...] = total[at : at + parameter.size].reshape(parameter.shape)  # type: ignore[index]
            at += parameter.size


def sum_over_places(comm: Comm, group: Group, sums: dict[Site, Any]) -> Any:
    """The sum of what all places of a group have, 1-D: a stage's ranks in rank order, then the stages. sums: this
    rank's places'.

    Each place's array goes to every other rank of the group.
    """
    requests, everybodys, like = [], dict(sums), next(iter(sums.values()))
    for tag, site in enumerate(group.sites):
        if site not in sums:
            everybodys[site] = np.empty_like(like)
            requests.append(comm.irecv(everybodys[site], site[1], tag))
    for tag, site in enumerate(group.sites):
        if site in sums:
            others = sorted({rank for _, rank in group.sites} - {comm.rank})
            requests += [comm.isend(sums[site], rank, tag) for rank in others]
    comm.waitall(requests)
    total: Any = None
    for stage in sorted({stage for stage, _ in group.sites}):
        of_stage: Any = None
        for site in sorted(site for site in group.sites if site[0] == stage):
            of_stage = everybodys[site] if of_stage is None else of_stage + everybodys[site]
        total = of_stage if total is None else total + of_stage
    return total


def _gradient(parameter: Parameter) -> Any:
    parameter.zero_fill()  # when nothing was added to it
    return parameter.gradient.local.reshape(-1)  # type: ignore[union-attr]


def _word(name: str) -> int:
    """A name as a number that travels."""
    return fingerprint_number(name, np.int64)


def _digest(parameter: Parameter) -> list[int]:
    """Shape and values as two numbers."""
    here = parameter.flat is None or not parameter.flat.released  # the shards of ZeRO 3 are not compared
    values = np.ascontiguousarray(parameter.data).tobytes() if here else b""
    return fingerprint(repr(parameter.shape).encode() + values).view(np.int64).tolist()  # type: ignore[no-any-return]


def _places(sites: Sequence[Site]) -> str:
    return " and ".join(f"stage {stage} on rank {rank}" for stage, rank in (sites[0], sites[-1]))


def _tell_everybody(comm: Comm, rows: Any) -> list[list[int]]:
    """Everybody's rows, the rank in front: two all-gathers, of the counts (8 B) and of the rows (8 ROW B each)."""
    with purpose("startup"):
        counts = np.asarray(all_gather(comm, np.array([len(rows)]))).tolist()
        flat = np.asarray(all_gather(comm, rows.reshape(-1), counts=[ROW * count for count in counts]))
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return [[rank, *row] for rank, row in zip(ranks, flat.reshape(-1, ROW).tolist(), strict=True)]
