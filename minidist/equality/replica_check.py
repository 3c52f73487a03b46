"""Do all copies of every parameter still have the same bits? A check for each step, whatever the layout.

Data-parallel ranks hold the same weights, tensor-parallel ranks the same norms, the first and the last stage the same
tied embedding. Nothing sends these weights again after the start: they stay equal because each rank adds the same
numbers in the same order, and a mistake in that (a gradient that one axis forgot to sum) shows in the loss only much
later.

Every rank tells all others, of each stretch of values that it holds, which part of which global tensor that is and a
fingerprint of its bits: 16 B a stretch, to everybody. Equal parts must have equal fingerprints.
"""

import numpy as np

from minidist.base.errors import MismatchError
from minidist.base.fingerprint import fingerprint_number
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.train.strategies.base import Strategy


def check_replicas(strategy: Strategy, step: int) -> None:
    """Raise MismatchError, on every rank alike, when two ranks hold different values of one part of a tensor.

    Each rank sends 8 B and 16 B for every part that it holds to everybody (purpose metrics).
    """
    comm, rows, names = strategy.axes.comm, [], {}
    for axis in strategy.data_axes:
        for parameter, array, start, stop in axis.weights():
            layout = parameter.layout
            tile = [strategy.axes[name].rank // layout.copies for name in layout.axes] if layout is not None else []
            what = fingerprint_number(repr((parameter.name, tile, start, stop)).encode())
            names[what] = parameter.name
            rows.append([what, fingerprint_number(np.ascontiguousarray(array).tobytes())])
    mine = np.array(rows, np.uint64).reshape(-1)
    with purpose("metrics"):
        counts = np.asarray(all_gather(comm, np.array([mine.size])))
        table = np.asarray(all_gather(comm, mine, counts=counts.tolist())).reshape(-1, 2)
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
