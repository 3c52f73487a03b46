"""bfloat16 x tensor parallel x data parallel, the layout of most large jobs: half of the bytes, and still one device.

    mpiexec -n 4 python mpi_examples/4_tensor_parallel/bf16_tensor_parallel.py
    python mpi_examples/4_tensor_parallel/bf16_tensor_parallel.py --ranks 4

Two neighbours cut every matrix, and the pairs are data-parallel replicas. The job runs in float32 and in bfloat16: the
activations that the pairs sum and the gradients that the replicas sum have half of the bytes; the losses that are
reported and the master weights stay in more bits. In bfloat16 a sum in another order differs in the third digit, so
no fixed bound proves that nothing is missing. `compare_rank` measures one: how far one device in bfloat16 is from one
device in float64, tensor by tensor, times 8. It holds every weight, gradient and optimizer state against it, after
every step. The same from the command line:

    mpiexec -n 4 minidist compare --dp 2 --tp 2 --precision bf16 --steps 4
"""

from minidist import TrainConfig, launch
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train

MODEL = {"data": "markov", "layers": 2, "width": 32, "heads": 4, "context": 16, "global_batch": 8, "lr": 0.01}
HALVED = ("gradient_reduce", "tensor_forward", "tensor_backward")


def main(comm):
    if comm.size % 2:
        raise SystemExit("two ranks share every matrix: use an even number of ranks")
    layout = {"dp": comm.size // 2, "tp": 2, "steps": 4}
    for precision in ("fp32", "bf16"):
        config = TrainConfig.make(**MODEL, **layout, precision=precision)
        before = comm.trace.bytes_by_purpose()
        result = train(comm, config)
        sent = {name: count - before.get(name, 0) for name, count in comm.trace.bytes_by_purpose().items()}
        if comm.rank == 0:
            parts = ", ".join(f"{name} {sent.get(name, 0):,} B" for name in HALVED)
            print(f"{precision}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}; {parts}", flush=True)
    verdict = compare_rank(comm, config)
    if comm.rank == 0:
        print(verdict.sentence(), flush=True)


if __name__ == "__main__":
    launch(main)
