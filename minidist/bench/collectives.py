"""How fast are our collectives, beside the MPI library's own and gloo's, in the same processes? And how fast is a
simulation?

Under `mpiexec` every all-reduce algorithm of ours, MPI_Allreduce and (where torch is installed) gloo sum the same
float32 array in turn; a round's time is the slowest rank's, a ratio is ours over theirs in that round, and the median
over rounds is reported. Results are compared before a ratio is printed. Checks (headers) and the record are off, as in
every benchmark.

Bandwidths are those of nccl-tests: *algorithm bandwidth* is the array's bytes over the time, *bus bandwidth* that times
2 (n-1)/n: what a perfect algorithm would have to carry over each rank's link, and so comparable with the link's own
speed.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import MinidistError, UsageError
from minidist.base.process import tune_process
from minidist.bench.step import environment
from minidist.collectives import ALGORITHMS, all_reduce, bus_factor
from minidist.comm import Comm, SimWorld
from minidist.comm.launcher import run_under_mpiexec
from minidist.comm.mpi.world import MPIWorld

KIB = 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB, 65536 * KIB)  # bytes
ROUND_SECONDS, MOST = 0.1, 200  # a side's share of a round takes about so long, and is at most so many calls
OPPONENTS = ("MPI_Allreduce", "gloo")
BEST = "best of ours"  # the algorithm with the least median

Side = Callable[[np.ndarray], object]


def bench_collectives(ranks: int = 2, rounds: int = 8, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """{environment, rows}: one row for each algorithm, size and opponent, then the simulated world's. Starts mpiexec
    itself.
    """
    if ranks < 2:
        raise UsageError(f"bench collectives --ranks {ranks}; a sum over ranks takes at least 2 processes")
    if rounds < 1:
        raise UsageError(f"bench collectives --rounds {rounds}; a median takes at least 1 round")
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError(
            f"bench collectives --sizes {','.join(map(str, sizes))}; bytes of float32 arrays are multiples of 4, at"
            " least 4"
        )
    answer = run_under_mpiexec(ranks, ["-m", "minidist.bench.collectives", str(rounds), ",".join(map(str, sizes))])
    result: dict[str, Any] = json.loads(answer.stdout)
    result["rows"] += simulated_rows()
    return result


def sides_of(world: MPIWorld) -> dict[str, Side]:
    """What is measured, by name: each sums its array over all ranks in place."""
    MPI, comm = world.MPI, world.comm
    sides: dict[str, Side] = {
        name: partial(all_reduce, comm, algorithm=name) for name in (*sorted(ALGORITHMS["all_reduce"]), "auto")
    }
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
    buffer, start_values = np.empty(size // 4, np.float32), np.full(size // 4, world.rank + 1, np.float32)
    times: dict[str, list[float]] = {name: [] for name in sides}
    total, repeats = world.size * (world.size + 1) // 2, {}
    for name, side in sides.items():
        buffer[:] = start_values
        side(buffer)
        if not np.all(buffer == total):
            raise MinidistError(
                f"rank {world.rank}: {name} of {size} B gave {buffer[:3]}, not {total}; no ratio is given"
            )
    buffer[:] = 0
    for name, side in sides.items():
        began = time.perf_counter()
        side(buffer)
        seconds = world.base.allreduce(time.perf_counter() - began, op=world.MPI.MAX)
        repeats[name] = max(1, min(MOST, int(ROUND_SECONDS / seconds)))
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            sides[name](buffer)
            world.base.Barrier()
            began = time.perf_counter()
            for _ in range(repeats[name]):
                sides[name](buffer)
            mine = (time.perf_counter() - began) / repeats[name]
            times[name].append(world.base.allreduce(mine, op=world.MPI.MAX))
    return times


def rows(times: dict[str, list[float]], size: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Each side against each opponent, and the best of ours; `algbw` and `busbw` in GB/s as nccl-tests defines them."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours = [name for name in times if name not in OPPONENTS]
    best = min((name for name in ours if name != "auto"), key=median.__getitem__)
    result = []
    for name in (BEST, *times):
        mine = best if name == BEST else name
        bandwidth = size / median[mine] / 1e9
        for other in (other for other in OPPONENTS if other in times and other != name):
            result.append(
                {
                    "name": f"{name} / {other}, {size // KIB} KiB, {ranks} ranks",
                    "ratio": statistics.median(a / b for a, b in zip(times[mine], times[other], strict=True)),
                    "median_s": median[mine],
                    "rounds": rounds,
                    "algbw": bandwidth,
                    "busbw": bandwidth * bus_factor("all_reduce", ranks),
                    "bytes": size,
                    "side": name,
                    "other": other,
                    "algorithm": mine,
                }
            )
    return result


def table(result: dict[str, Any]) -> str:
    """Size by size as nccl-tests prints it: time, algorithm and bus bandwidth, and the ratio to each opponent."""
    measured = [row for row in result["rows"] if "side" in row]
    others = [name for name in OPPONENTS if any(row["other"] == name for row in measured)]
    lines = [
        f"{'bytes':>10s}  {'all-reduce':20s}{'time us':>10s}{'algbw GB/s':>12s}{'busbw GB/s':>12s}"
        + "".join(f"{'/ ' + name:>17s}" for name in others)
    ]
    for size in dict.fromkeys(row["bytes"] for row in measured):
        for side in dict.fromkeys(row["side"] for row in measured):
            group = {row["other"]: row for row in measured if (row["bytes"], row["side"]) == (size, side)}
            row = next(iter(group.values()))
            ratios = "".join(f"{group[name]['ratio']:17.2f}" if name in group else f"{'-':>17s}" for name in others)
            name = f"* {row['algorithm']}" if side == BEST else f"  {side}"
            lines.append(
                f"{size:10,d}  {name:20s}{1e6 * row['median_s']:10.1f}{row['algbw']:12.2f}{row['busbw']:12.2f}{ratios}"
            )
    lines.append("* the best of ours; all are float32 sums in place, checks and record off")
    return "\n".join(lines)


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
