"""`--check-replicas`: do all replicas of every parameter still have the same bits? A check of each step in any layout.

Data-parallel ranks hold the same weights, tensor-parallel ranks the same norms, the first and the last stage the same
tied embedding. Nothing sends these weights again after the start: they stay equal because each rank adds the same
numbers in the same order, and a mistake in that (a gradient that one axis forgot to sum) shows in the loss only much
later.

Every rank sends, for each parameter shard that it holds, which part of which global tensor that is and a fingerprint of
its bits: 16 B per shard, to every rank. Equal parts must have equal fingerprints. (`parallel.tensor.check_replicas` is
for a module of a user's own loop; this one knows shards of ZeRO and stages of a pipeline, too.)

Proved by: tests/train/test_replicas.py
"""

import numpy as np

from minidist.base.errors import MismatchError
from minidist.base.fingerprint import fingerprint_number
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.train.strategies.mesh import MeshStrategy


def check_replicas(strategy: MeshStrategy, step: int) -> None:
    """Raise MismatchError, on every rank alike, when two ranks hold different values of one part of a tensor.

    Each rank sends 8 B, and 16 B for every shard that it holds, to every rank (purpose metrics).
    """
    comm, rows, names = strategy.axes.comm, [], {}

    # One row per shard: which part of which tensor, and its bits.
    for axis in strategy.data_axes:
        for shard in axis.weights():
            layout = shard.parameter.layout
            # Its coordinates on the axes that cut it; ranks with copies of one shard have the same ones.
            cut = [strategy.axes[name].rank // layout.copies for name in layout.axes] if layout is not None else []
            what = fingerprint_number(repr((shard.parameter.name, cut, shard.start, shard.stop)).encode())
            names[what] = shard.parameter.name
            rows.append([what, fingerprint_number(np.ascontiguousarray(shard.values).tobytes())])

    # How many numbers each rank has, then the numbers.
    mine = np.array(rows, np.uint64).reshape(-1)
    with purpose("metrics"):
        counts = np.asarray(all_gather(comm, np.array([mine.size])))
        table = np.asarray(all_gather(comm, mine, counts=counts.tolist())).reshape(-1, 2)

    # All ranks compare all rows with the first rank that has the same part.
    first: dict[int, tuple[int, int]] = {}
    wrong = []
    for rank, (what, bits) in zip(np.repeat(np.arange(comm.size), counts // 2).tolist(), table.tolist(), strict=True):
        other, expected = first.setdefault(what, (rank, bits))
        if bits != expected:
            wrong.append((what, other, rank))
    if wrong:
        what, other, rank = wrong[0]
        raise MismatchError(
            f"after step {step} parameter {names.get(what, 'of another stage')!r} is not the same on rank {rank} as on"
            f" rank {other} ({len(wrong)} such parts in all); its gradient was not summed over all ranks that use it,"
            " or its update depends on the rank"
        )
