"""Save with ZeRO 3 on all ranks, then continue with ZeRO 1 on half of them: a checkpoint belongs to no layout.

mpiexec -n 4 python mpi_examples/7_more/checkpoint_reshard.py
python mpi_examples/7_more/checkpoint_reshard.py --ranks 4
"""

import tempfile
from pathlib import Path

from minidist import TrainConfig, launch
from minidist.job.checkpoint import Checkpoint
from minidist.job.train.trainer import train

JOB = {"width": 32, "context": 32, "global_batch": 8, "reduction": "ordered"}


def main(comm):
    directory = comm.recv_object(0) if comm.rank else tempfile.mkdtemp(prefix="minidist-")
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.send_object(directory, rank)  # all ranks must see this directory
    train(comm, TrainConfig.make(**JOB, zero=3, steps=3, save=directory))
    if comm.rank == 0:
        checkpoint = Checkpoint(directory)
        files = sorted(path.name for path in checkpoint.path.iterdir())
        print(
            f"step {checkpoint.step} by {comm.size} ranks with ZeRO 3: {len(checkpoint.tensors)} global tensors in"
            f" {', '.join(files)}"
        )
    half = comm.split(comm.rank * 2 // comm.size)  # ranks 0..n/2-1, and the others
    if comm.rank < half.size or comm.size == 1:
        result = train(half, TrainConfig.make(**JOB, zero=1, steps=6, save=directory, resume=True))
        if comm.rank == 0:
            print(f"resumed by {half.size} with ZeRO 1 after step {result.first_step}")
            print("losses", " ".join(f"{loss:.4f}" for loss in result.losses), flush=True)
            for path in sorted(Path(directory).rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            Path(directory).rmdir()


if __name__ == "__main__":
    launch(main)
