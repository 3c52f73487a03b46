"""Whole matrices for Muon, although each rank has parts of them: gathered everywhere, or each at one owner.

    rank 0   | a . | b .|        owner        all-to-all: every rank sends its part of a matrix to the matrix's owner
    rank 1   | . a | . b|                     the owner orthogonalises it
                                              all-to-all: every rank gets its part back
                                 everywhere   all-gather: every rank has, and orthogonalises, every matrix

Newton-Schulz of a shard is not the shard of Newton-Schulz, so shards must be gathered. Everywhere costs no second
message, but n times the arithmetic, and (n-1)/n of all matrices leave a rank where two parts of 1/n would do: with more
than two ranks owners are cheaper. Replicas of a data axis (ZeRO 0) have whole matrices already; owners then divide the
arithmetic and all-gather the results. What tensor parallelism has split is joined by its ranks first (`full_tensor`)
and split again afterwards, on each rank of the axis.

Only values move, so the bits of the result are those of one device. Sources: K. Jordan's and Moonlight's distributed
Muon (arXiv:2502.16982, section 2.3).

Proved by: tests/parallel/test_muon.py
"""

from collections.abc import Iterable, Mapping
from math import prod

from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.layout import cut
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather, all_to_all
from minidist.core.comm import Comm
from minidist.optim.muon import Shape, Updates, newton_schulz
from minidist.parallel.assignment import assign_keys
from minidist.parallel.tensor.full_state import full_tensor, local_tensor

new_purpose("muon")

FORMS = ("owner", "everywhere")
Shapes = Mapping[str, Shape]  # of whole matrices, by name
Counts = dict[str, list[int]]  # how many elements of a matrix each rank has
Owners = dict[str, int]  # the rank that orthogonalises a matrix


class WholeMatrices:
    """The `whole_matrices` of Muon: orthogonalises matrices whose parts the ranks hold.

        optimizer = Muon(sharded_parameters(model), whole_matrices=WholeMatrices(model.parameters()))

    parameters: on every rank in the same order; over which ranks they are sharded, ZeRO and FSDP have noted in them.
    form: "owner" or "everywhere". replicas: the ranks of a data axis without shards, among which owners divide the
    arithmetic. axes: communicators by the names of the parameters' layouts, such as tp=comm.

    A step sends what `muon_volume` says, in the float32 or float64 of the update (purpose `muon`).
    """

    def __init__(
        self, parameters: Iterable[Parameter], form: str = "owner", replicas: Comm | None = None, **axes: Comm
    ) -> None:
        if form not in FORMS:
            raise UsageError(f"form={quoted(form)}; it must be {' or '.join(map(repr, FORMS))}")
        self.parameters = list(dict.fromkeys(parameters))
        self.form, self.replicas, self.axes = form, replicas, axes

    def __call__(self, updates: Updates, shapes: Shapes) -> Updates:
        """Return this rank's elements of the orthogonalised matrices; updates: those of the updates, by name."""
        matrices = self._matrices(shapes)
        comm, counts = self._placement(matrices)
        owners = self._owners(matrices, shapes, comm)
        if comm is None or comm.size == 1:
            return {p.name: self._orthogonal(p, updates[p.name], shapes) for p in matrices if p.name in updates}
        if self.replicas is not None:
            return self._of_replicas(updates, shapes, matrices, comm, owners)
        if owners is None:
            return self._everywhere(updates, shapes, matrices, comm, counts)
        return self._at_owners(updates, shapes, matrices, comm, counts, owners)

    def _of_replicas(
        self, updates: Updates, shapes: Shapes, matrices: list[Parameter], comm: Comm, owners: Owners | None
    ) -> Updates:
        """Return whole matrices: there is nothing to gather, and the results of other owners to receive."""
        present = [p for p in matrices if p.name in updates]
        if owners is None:
            return {p.name: self._orthogonal(p, updates[p.name], shapes) for p in present}
        of_rank = [[p for p in present if owners[p.name] == rank] for rank in range(comm.size)]
        mine = [self._orthogonal(p, updates[p.name], shapes) for p in of_rank[comm.rank]]
        with purpose("muon"):
            totals = [sum(p.size for p in group) for group in of_rank]
            gathered = all_gather(comm, _joined(mine, updates), counts=totals)
        ordered = [p for group in of_rank for p in group]
        return {p.name: part for p, part in zip(ordered, cut(gathered, [p.size for p in ordered]), strict=True)}

    def _everywhere(
        self, updates: Updates, shapes: Shapes, matrices: list[Parameter], comm: Comm, counts: Counts
    ) -> Updates:
        """Return this rank's elements; all ranks get all parts, in the order of the ranks and then of the matrices."""
        ranks, me = range(comm.size), comm.rank
        with purpose("muon"):
            totals = [sum(counts[p.name][rank] for p in matrices) for rank in ranks]
            parts = [_part(p, updates, counts[p.name][me]) for p in matrices]
            gathered = all_gather(comm, _joined(parts, updates), counts=totals)
        whole = _by_matrix(gathered, matrices, counts, ranks)
        return {p.name: cut(self._orthogonal(p, whole[p.name], shapes), counts[p.name])[me] for p in matrices}

    def _at_owners(
        self, updates: Updates, shapes: Shapes, matrices: list[Parameter], comm: Comm, counts: Counts, owners: Owners
    ) -> Updates:
        """Return this rank's elements of matrices whose parts go to their owners and come back."""
        ranks, me = range(comm.size), comm.rank
        # There ...
        of_rank = [[p for p in matrices if owners[p.name] == rank] for rank in ranks]
        ordered = [p for group in of_rank for p in group]
        there = [sum(counts[p.name][me] for p in group) for group in of_rank]
        here = [sum(counts[p.name][rank] for p in of_rank[me]) for rank in ranks]
        with purpose("muon"):
            parts = _joined((_part(p, updates, counts[p.name][me]) for p in ordered), updates)
            received = all_to_all(comm, parts, send_counts=there, receive_counts=here)
        whole = _by_matrix(received, of_rank[me], counts, ranks)
        result = {p.name: cut(self._orthogonal(p, whole[p.name], shapes), counts[p.name]) for p in of_rank[me]}

        # ... and back.
        with purpose("muon"):
            parts = _joined((result[p.name][rank] for rank in ranks for p in of_rank[me]), updates)
            returned = all_to_all(comm, parts, send_counts=here, receive_counts=there)
        sizes = [counts[p.name][me] for p in ordered]
        return {p.name: piece for p, piece in zip(ordered, cut(returned, sizes), strict=True)}

    def sent(self, shapes: Shapes) -> int:
        """Return the elements that all ranks of the data axis together send in one step, on that axis and on others."""
        matrices = self._matrices(shapes)
        comm, counts = self._placement(matrices)
        owners, ranks = self._owners(matrices, shapes, comm), 1 if comm is None else comm.size
        held, of_matrix = [counts[p.name] for p in matrices], list(owners.values()) if owners else None
        total = muon_volume(held, of_matrix, ranks, self.replicas)

        # A ring's all-gather of each matrix that another axis cuts, where the matrix is orthogonalised.
        for p in matrices:
            cut_by = [self.axes[name].size for name in p.layout.axes] if p.layout is not None else []
            total += (1 if owners else ranks) * sum((n - 1) * p.size for n in cut_by)
        return total

    def _matrices(self, shapes: Shapes) -> list[Parameter]:
        return [p for p in self.parameters if p.name in shapes]

    def _placement(self, matrices: list[Parameter]) -> tuple[Comm | None, Counts]:
        """Return the ranks that share the matrices, and how many elements of each matrix every rank has."""
        shards = {p.name: (p.flat.shard, p.flat.slice_of(p)) for p in matrices if p.flat is not None and p.flat.shard}
        if not shards:
            return self.replicas, {p.name: [p.size] * (self.replicas.size if self.replicas else 1) for p in matrices}
        comm: Comm = next(iter(shards.values()))[0].comm
        return comm, {name: shard.counts(place) for name, (shard, place) in shards.items()}

    def _owners(self, matrices: list[Parameter], shapes: Shapes, comm: Comm | None) -> Owners | None:
        """Return the owner of each matrix, the largest first, each to the rank with the least; None if all compute."""
        if self.form == "everywhere" or comm is None or comm.size == 1:
            return None
        keys = assign_keys([prod(shapes[p.name]) for p in matrices], comm.size)
        rank_of = {key: rank for rank, held in enumerate(keys) for key in held}
        return {p.name: rank_of[i] for i, p in enumerate(matrices)}

    def _orthogonal(self, parameter: Parameter, update: xp.Array, shapes: Shapes) -> xp.Array:
        """Return the orthogonalised matrix, or this rank's tensor-parallel shard of it; `update` is as large."""
        layout = parameter.layout
        whole = full_tensor(update.reshape(parameter.shape), layout, self.axes, why="muon")
        return local_tensor(newton_schulz(whole.reshape(shapes[parameter.name])), layout, self.axes).reshape(-1)


def muon_volume(counts: list[list[int]], owners: list[int] | None, ranks: int, replicas: object | None = None) -> int:
    """Return the elements that all `ranks` of a data axis together send in one step.

    counts: of each matrix, how many elements each rank has (replicas: all of them). owners: of each matrix; None: every
    rank orthogonalises all. Shards everywhere: (n-1) times all matrices; owners: what they do not have, there and back.
    Replicas send nothing, or with owners (n-1) times all matrices.
    """
    if replicas is not None:
        return 0 if owners is None else (ranks - 1) * sum(of_matrix[0] for of_matrix in counts)
    if owners is None:
        return (ranks - 1) * sum(map(sum, counts))
    return 2 * sum(sum(of_matrix) - of_matrix[owner] for of_matrix, owner in zip(counts, owners, strict=True))


def _part(p: Parameter, updates: Updates, size: int) -> xp.Array:
    """Return this rank's elements of an update; zeros without a gradient, so that every rank takes part."""
    found = updates.get(p.name)
    return xp.zeros(size, p.dtype, next(iter(updates.values()), None)) if found is None else found


def _joined(parts: Iterable[xp.Array], updates: Updates) -> xp.Array:
    """Return the parts as one array; none of them as an empty array of the updates' dtype."""
    like = next(iter(updates.values()), xp.zeros(0, xp.float32))
    return xp.concatenate([like[:0], *parts])


def _by_matrix(array: xp.Array, matrices: list[Parameter], counts: Counts, ranks: Iterable[int]) -> Updates:
    """Return whole matrices from their parts, which follow one another by rank and then by matrix."""
    order = [(p.name, rank) for rank in ranks for p in matrices]
    pieces = dict(zip(order, cut(array, [counts[name][rank] for name, rank in order]), strict=True))
    return {p.name: xp.concatenate([pieces[p.name, rank] for rank in ranks]) for p in matrices}
