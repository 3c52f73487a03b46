"""How fast are our collectives, beside the MPI library's own and gloo's, in the same processes? And how fast is a simulation?

Under `mpiexec` every all-reduce algorithm of ours, MPI_Allreduce and (where torch is installed) gloo sum the same float32
array in turn; a round's time is the slowest rank's, a ratio is ours over theirs in that round, and the median over rounds is
reported. Results are compared before a ratio is printed. Checks (headers) are off, as in every benchmark.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import MinidistError
from minidist.base.process import tune_process
from minidist.collectives import all_reduce
from minidist.comm import Comm, SimWorld
from minidist.comm.launcher import run_under_mpiexec
from minidist.comm.mpi import MPIWorld
from minidist.train.bench_step import environment

KIB = 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB, 65536 * KIB)  # bytes
ALGORITHMS = ("ring", "ordered")
ROUND_BYTES = 32 * 1024 * KIB  # a round sums about so many bytes, at most 200 arrays

Side = Callable[[np.ndarray], object]


def bench_collectives(ranks: int = 2, rounds: int = 8, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """{environment, rows}: one row for each algorithm, size and opponent, then the simulated world's. Starts mpiexec itself."""
    answer = run_under_mpiexec(
        ranks, ["-m", "minidist.train.bench_collectives", str(rounds), ",".join(map(str, sizes))]
    )
    result: dict[str, Any] = json.loads(answer.stdout)
    result["rows"] += simulated_rows()
    return result


def sides_of(world: MPIWorld) -> dict[str, Side]:
    """What is measured, by name: each sums its array over all ranks in place."""
    MPI, comm = world.MPI, world.comm
    sides: dict[str, Side] = {name: partial(all_reduce, comm, algorithm=name) for name in ALGORITHMS}
    sides["MPI_Allreduce"] = lambda array: world.base.Allreduce(MPI.IN_PLACE, [array, MPI.FLOAT])
    gloo = gloo_side(world, comm)
    return sides | ({"gloo": gloo} if gloo else {})


def gloo_side(world: MPIWorld, comm: Comm) -> Side | None:
    """PyTorch's all_reduce over gloo in these processes; None without torch."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return None
    folder = world.base.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=comm.rank, world_size=comm.size
    )
    return lambda array: dist.all_reduce(torch.from_numpy(array))


def measure(world: MPIWorld, sides: dict[str, Side], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each side in each round: the slowest rank's."""
    repeats = max(1, min(200, ROUND_BYTES // size))
    buffer, start_values = np.empty(size // 4, np.float32), np.full(size // 4, world.rank + 1, np.float32)
    times: dict[str, list[float]] = {name: [] for name in sides}
    total = world.size * (world.size + 1) // 2
    for name, side in sides.items():
        buffer[:] = start_values
        side(buffer)
        if not np.all(buffer == total):
            raise MinidistError(
                f"rank {world.rank}: {name} of {size} B gave {buffer[:3]}, not {total}; no ratio is given"
            )
    buffer[:] = 0
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            sides[name](buffer)
            world.base.Barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                sides[name](buffer)
            mine = (time.perf_counter() - began) / repeats
            times[name].append(world.base.allreduce(mine, op=world.MPI.MAX))
    return times


def rows(times: dict[str, list[float]], size: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Our algorithms against each opponent; `algbw` and `busbw` in GB/s as nccl-tests defines them."""
    result = []
    for name in ALGORITHMS:
        seconds = statistics.median(times[name])
        bandwidth = size / seconds / 1e9
        for other in (name for name in times if name not in ALGORITHMS):
            result.append({
                "name": f"{name} / {other}, {size // KIB} KiB, {ranks} ranks",
                "ratio": statistics.median(a / b for a, b in zip(times[name], times[other], strict=True)),
                "median_s": seconds, "rounds": rounds, "algbw": bandwidth, "busbw": bandwidth * 2 * (ranks - 1) / ranks,
            })  # fmt: skip
    return result


def simulated_rows() -> list[dict[str, Any]]:
    """Messages a second of the simulated world; minima of three."""

    def ping(comm: Comm) -> None:
        buffer = np.zeros(1)
        for _ in range(20_000):
            if comm.rank == 0:
                comm.send(buffer, 1)
            else:
                comm.recv(buffer, 0)

    def shifts(comm: Comm) -> None:
        mine, other = np.zeros(1), np.zeros(1)
        for _ in range(20):
            comm.sendrecv(mine, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)

    result = []
    for name, ranks, messages, program in (
        ("simulated: send and receive", 2, 20_000, ping),
        ("simulated: 20 shifts", 4096, 20 * 4096, shifts),
        ("simulated: barrier", 10_000, 14 * 10_000, lambda comm: comm.barrier()),
    ):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            SimWorld(ranks, checks=False).run(program)  # as in every benchmark
            seconds.append(time.perf_counter() - began)
        best = min(seconds)
        result.append(
            {
                "name": f"{name}, {ranks} ranks",
                "ratio": None,
                "median_s": best,
                "rounds": 3,
                "messages_per_s": messages / best,
            }
        )
    return result


def main(rounds: int, sizes: list[int]) -> None:
    """One rank of the benchmark; rank 0 prints the result as JSON."""
    tune_process()
    world = MPIWorld(checks=False, timeout=300, record=False)
    sides = sides_of(world)
    result = [row for size in sizes for row in rows(measure(world, sides, size, rounds), size, world.size, rounds)]
    if world.rank == 0:
        library = world.MPI.Get_library_version().splitlines()[0].strip("\0 ")
        print(json.dumps({"environment": {**environment("gloo" in sides), "mpi": library}, "rows": result}))
    world.finish()
    world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")])
