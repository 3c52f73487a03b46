"""What error feedback holds back, in a checkpoint: gradients that were computed, and have not been sent yet.

A residual belongs to one rank of a data axis. It is stored by the number of that rank, and on another number of ranks
the sum of all is kept (`checkpoint/local.py`, rule "sum"). What else a compressor has is equal on all ranks of its
axis, and is stored once. Sends nothing.
"""

from collections.abc import Iterator

from minidist.base.errors import UsageError
from minidist.checkpoint import Checkpoint, Local, Piece, local_pieces, read_local
from minidist.comm import Comm
from minidist.parallel.compression import Compressor
from minidist.train.strategies.base import Strategy
from minidist.train.strategies.data_axes import Replicated


def residual_pieces(strategy: Strategy) -> list[Piece]:
    """This rank's pieces of a checkpoint beside weights and optimizer state."""
    pieces = []
    for name, axis, compressor, comm in _compressed(strategy):
        if compressor.feedback:
            pieces += local_pieces(
                comm.rank, [Local(f"residual/{name}", compressor.residual(axis.parallel.reducer.buckets))]
            )
        for key, array in compressor.shared_state().items():
            pieces.append(Piece(f"compression/{name}/{key}", array.shape, array, copies=(comm.rank, comm.size)))
    return pieces


def load_residuals(checkpoint: Checkpoint, strategy: Strategy) -> None:
    """Give every compressor what the checkpoint has for it. Raises UsageError where a residual would be lost."""
    stored = {name.rpartition("/")[0] for name in checkpoint.tensors if name.startswith("local/residual/")}
    wanted = {f"local/residual/{name}" for name, _, compressor, _ in _compressed(strategy) if compressor.feedback}
    if stored and not (wanted and wanted <= stored):
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} holds gradients that were not sent yet ({sorted(stored)[0]}), and"
            " this job has no place for them; resume with a --compression with error feedback, and with the --tp, --pp"
            " and --ep of the checkpoint"
        )
    for name, axis, compressor, comm in _compressed(strategy):
        residual = read_local(checkpoint, f"residual/{name}", comm.rank, comm.size) if compressor.feedback else None
        if residual is not None:
            compressor.load_residual(axis.parallel.reducer.buckets, residual)
        prefix = f"compression/{name}/"
        shared = {key[len(prefix) :]: checkpoint.tensor(key) for key in checkpoint.tensors if key.startswith(prefix)}
        if shared:
            compressor.load_shared_state(shared)


def _compressed(strategy: Strategy) -> Iterator[tuple[str, Replicated, Compressor, Comm]]:
    """(name, data axis, compressor, communicator) of each data axis of this rank whose gradients are compressed."""
    for axis in strategy.data_axes:
        if isinstance(axis, Replicated) and axis.compressor is not None:
            experts = f" experts {strategy.axes.ep.rank}" if axis.experts else ""
            yield f"stage {axis.stage} tile {strategy.axes.tp.rank}{experts}", axis, axis.compressor, axis.parallel.comm
