"""Parameters that live in more than one place: tied embeddings on two stages, and whole stages in DualPipe.

    stage 0, rank 0   wte   gradient of the embedding ─┐
                                                       ├─ both ranks add: stage 0's sum, then stage 3's
    stage 3, rank 3   wte   gradient of the head ──────┘

Every place sends its sum to the other places' ranks, and everybody adds in the same order: the ranks of a stage in rank order,
then the stages in stage order. So the copies stay equal bit for bit. This comes before any reduction over the data axis.
Volume: with n places each sends its bytes n-1 times, which for n = 2 is an all-reduce's volume.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base.errors import MismatchError, UsageError, nearest
from minidist.base.trace import purpose
from minidist.comm import Comm

Site = tuple[int, int]  # stage, rank


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
        everybody = _tell_everybody(comm, [(s, p.name, p.shape, _digest(p)) for (s, _), p in self.mine.items()])
        known = {name for table in everybody for _, name, _, _ in table}
        for name in tied:
            if name not in known:
                raise UsageError(f"tied parameter {name!r} is on no stage{nearest(name, known)}; name one of the stages' parameters")
        where: dict[tuple[int | None, str], list[Site]] = {}
        values: dict[tuple[int | None, str], Any] = {}
        for rank, table in enumerate(everybody):
            for stage, name, shape, digest in table:
                key = (None if name in tied else stage, name)
                where.setdefault(key, []).append((stage, rank))
                if values.setdefault(key, (shape, digest)) != (shape, digest):
                    raise MismatchError(
                        f"rank {comm.rank}: the copies of parameter {name!r} differ between {_places(where[key])}; build every copy "
                        "from the same seed"
                    )
        groups: dict[tuple[bool, tuple[Site, ...]], list[str]] = {}
        for (stage_, name), sites in sorted(where.items(), key=lambda entry: (entry[0][0] is not None, entry[0][0] or 0)):
            if len(sites) > 1:
                groups.setdefault((stage_ is None, tuple(sorted(sites))), []).append(name)
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

    def _add(self, group: Group, own: list[Site]) -> None:
        comm, first = self.comm, [self.mine[own[0][0], name] for name in group.names]
        sums: dict[Site, Any] = {site: np.concatenate([_gradient(self.mine[site[0], name]) for name in group.names]) for site in own}
        requests = []
        for tag, site in enumerate(group.sites):
            if site not in sums:
                sums[site] = np.empty(sum(p.size for p in first), first[0].dtype)
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
        at = 0
        for name, parameter in zip(group.names, first, strict=True):
            for stage, _ in own:
                self.mine[stage, name].grad = total[at : at + parameter.size].reshape(parameter.shape)
            at += parameter.size


def _gradient(parameter: Parameter) -> Any:
    return (np.zeros(parameter.shape, parameter.dtype) if parameter.grad is None else parameter.grad).reshape(-1)


def _digest(parameter: Parameter) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(parameter.data).tobytes(), digest_size=16).digest()


def _places(sites: Sequence[Site]) -> str:
    return " and ".join(f"stage {stage} on rank {rank}" for stage, rank in (sites[0], sites[-1]))


def _tell_everybody(comm: Comm, value: Any) -> list[Any]:
    """Rank 0 collects every rank's value and sends the list to all (purpose startup)."""
    with purpose("startup"):
        if comm.rank:
            comm.send_object(value, 0)
            return list(comm.recv_object(0))
        values = [value, *(comm.recv_object(rank) for rank in range(1, comm.size))]
        for rank in range(1, comm.size):
            comm.send_object(values, rank)
        return values
