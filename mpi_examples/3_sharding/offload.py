"""Optimizer state in host memory: fewer bytes on the device, and what crosses the link instead.

mpiexec -n 2 python mpi_examples/3_sharding/offload.py
python mpi_examples/3_sharding/offload.py --ranks 2
"""

from minidist import TrainConfig, launch
from minidist.job.train.trainer import train


def main(comm):
    for offload in ("none", "optimizer", "activations", "parameters"):
        recompute = "full" if offload == "activations" else "none"
        zero = 3 if offload == "parameters" else 2
        config = TrainConfig.make(
            layers=4, context=64, micro_batch=4, steps=3, zero=zero, offload=offload, recompute=recompute
        )
        result = train(comm, config)
        if comm.rank == 0:
            host = result.measured.get("host", {"peak": 0, "to_host": 0, "to_device": 0})
            crossed = host["to_host"] + host["to_device"]
            print(
                f"{offload:12} loss {result.losses[-1]:.6f}  device {result.peak_bytes:11,} B  host {host['peak']:11,}"
                f" B  crossed {crossed:11,} B",
                flush=True,
            )


if __name__ == "__main__":
    launch(main)
