"""How fast are our collectives, compared with the MPI library's and gloo's? And how fast is a simulation?

Under `mpiexec` every all-reduce algorithm of ours, MPI_Allreduce, a loop of mpi4py's Sendrecv and (where torch is
installed) gloo sum the same float32 array in turn. Results are compared before anything is timed.

Bandwidths are those of nccl-tests: *algorithm bandwidth* is the array's bytes over the time, *bus bandwidth* is that
times 2 (n-1)/n: what a perfect algorithm would have to carry over each rank's link, and so comparable with the link's
own speed.

Proved by: tests/bench/test_collectives.py
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from minidist.collectives import bus_factor, load_algorithm
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.auto import choose
from minidist.collectives.tuning import measured_times
from minidist.comm import SimWorld
from minidist.comm.mpi.world import MPIWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import MinidistError, UsageError
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.nn import MLP
from minidist.core.parallel.data_parallel import DistributedDataParallel
from minidist.report.bench.environment import environment, has_torch
from minidist.report.bench.harness import (
    Times,
    interleave_ranks,
    median_ratio,
    mpi_world,
    ratio_and_goal,
    report,
    run_ranks,
    seconds_per_call,
    slowest,
)

KIB = 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB, 65536 * KIB)  # bytes
ROUND_SECONDS, MAX_CALLS = 0.1, 1000  # a side's share of a round: its time, and its number of calls at most
OPPONENTS = ("MPI_Allreduce", "mpi4py", "gloo")
TOLERANCE = 1.1  # a higher ratio of the chosen algorithm's time to that of the best one is reported
BEST = "best of ours"  # the algorithm with the least median
# The goals of its ratio to MPI_Allreduce: up to this number of bytes, and above them.
GOALS, GOAL_ABOVE = {64 * KIB: 1.3, 1024 * KIB: 1.1}, 0.8

Side = Callable[[np.ndarray], object]


def bench_collectives(
    ranks: int = 2, rounds: int = 8, sizes: Sequence[int] = SIZES, own: Sequence[str] = ()
) -> dict[str, Any]:
    """Return {environment, rows}: one row per algorithm, size and opponent, then those of the simulated world.

    own: all-reduces of the user's, FILE.py:FUNCTION. Starts `mpiexec -n ranks` itself.
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
    result = run_ranks(main, ranks, rounds, list(sizes), list(own))
    result["rows"] += simulated_rows()
    return result


def sides_of(world: MPIWorld, with_torch: bool) -> dict[str, Side]:
    """Return what is measured, by name: each sums its array over all ranks in place."""
    MPI = world.MPI
    sides: dict[str, Side] = {
        name: partial(all_reduce, world.comm, algorithm=name) for name in (*sorted(ALGORITHMS["all_reduce"]), "auto")
    }
    sides["MPI_Allreduce"] = lambda array: world.base.Allreduce(MPI.IN_PLACE, [array, MPI.FLOAT])
    if world.size & (world.size - 1) == 0:
        sides["mpi4py"] = partial(doubling_in_mpi4py, world.base)
    if with_torch:
        import torch
        import torch.distributed as dist

        sides["gloo"] = lambda array: dist.all_reduce(torch.from_numpy(array))
    return sides


def doubling_in_mpi4py(comm: Any, array: np.ndarray) -> None:
    """Sum by recursive doubling in mpi4py and NumPy alone: the floor of what a Python program of these messages takes.

    comm: an MPI communicator of 2^k ranks. Sends the whole array in each of log2 n rounds.
    """
    incoming, distance = np.empty_like(array), 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        comm.Sendrecv(array, partner, 0, incoming, partner, 0)
        np.add(array, incoming, out=array)
        distance *= 2


def measure(world: MPIWorld, sides: dict[str, Side], size: int, rounds: int) -> Times:
    """Return the seconds of one call of each side in each round; MinidistError when a side sums wrongly."""
    buffer, total = np.empty(size // 4, np.float32), world.size * (world.size + 1) // 2
    # Rank r adds r + 1, so every element of the sum is n (n + 1) / 2.
    for name, side in sides.items():
        buffer[:] = world.rank + 1
        side(buffer)
        if not np.all(buffer == total):
            raise MinidistError(
                f"rank {world.rank}: {name} of {size} B gave {buffer[:3]}, not {total}; no ratio is given"
            )

    # As many calls per round as fit into ROUND_SECONDS, the same number on all ranks.
    buffer[:] = 0
    bound = {name: partial(side, buffer) for name, side in sides.items()}
    calls = {}
    for name, call in bound.items():
        seconds = slowest(world, seconds_per_call(call, 1))
        calls[name] = max(1, min(MAX_CALLS, int(ROUND_SECONDS / seconds)))
    return interleave_ranks(world, bound, rounds, calls)


def best_by_other_rounds(times: Times, names: Sequence[str]) -> list[float]:
    """Return in each round the seconds of the best algorithm, which the rounds of the other parity choose.

    The least of noisy medians is too small in the rounds that it was chosen by, so that an algorithm that is as fast
    seems slower there, by more the busier the machine is. In other rounds the noise of both is the same.
    """
    chosen = [min(names, key=lambda name: statistics.median(times[name][1 - i :: 2] or times[name])) for i in (0, 1)]
    return [times[chosen[i % 2]][i] for i in range(len(times[names[0]]))]


def rows(times: Times, size: int, ranks: int, rounds: int, chosen: str = "auto") -> list[dict[str, Any]]:
    """Return each side against each opponent, and the best of ours; `algbw` and `busbw` in GB/s as in nccl-tests.

    to_best: the ratio to the best of ours; of "auto" to `best_by_other_rounds`. chosen: the algorithm that "auto"
    takes. Its row also has choice_to_best, that of the algorithm's own times: the difference is the cost of choosing,
    and noise.
    """
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    algorithms = [name for name in times if name not in (*OPPONENTS, "auto")]
    best, in_round = min(algorithms, key=median.__getitem__), best_by_other_rounds(times, algorithms)

    # One row per side and opponent; the best of ours appears a second time under another name.
    result = []
    for name in (BEST, *times):
        mine = best if name == BEST else name
        bandwidth = size / median[mine] / 1e9
        for other in (other for other in OPPONENTS if other in times and other != name):
            result.append(
                {
                    "name": f"{name} / {other}, {size // KIB} KiB, {ranks} ranks",
                    "ratio": median_ratio(times[mine], times[other]),
                    "median_s": median[mine],
                    "rounds": rounds,
                    "algbw": bandwidth,
                    "busbw": bandwidth * bus_factor("all_reduce", ranks),
                    "bytes": size,
                    "side": name,
                    "other": other,
                    "algorithm": chosen if name == "auto" else mine,
                    "to_best": median_ratio(times[mine], in_round if name == "auto" else times[best]),
                }
            )
            if (name, other) == (BEST, "MPI_Allreduce"):
                result[-1]["target"] = next((goal for most, goal in GOALS.items() if size <= most), GOAL_ABOVE)
            if name == "auto":
                result[-1]["choice_to_best"] = median_ratio(times.get(chosen, times[mine]), in_round)
    return result


def _line(group: dict[str, dict[str, Any]], others: list[str]) -> str:
    """Format one size and side, with the ratios to all opponents. group: its rows, by the opponent."""
    row = next(iter(group.values()))
    ratios = "".join(f"{group[name]['ratio']:17.2f}" if name in group else f"{'-':>17s}" for name in others)
    names = {BEST: f"* {row['algorithm']}", "auto": f"  auto {row['algorithm']}"}
    name, times = names.get(row["side"], f"  {row['side']}"), f"{1e6 * row['median_s']:10.1f}"
    return f"{row['bytes']:10,d}  {name:25s}{times}{row['algbw']:12.2f}{row['busbw']:12.2f}{ratios}"


def table(result: dict[str, Any]) -> str:
    """Format the rows as nccl-tests does: time, algorithm and bus bandwidth, and the ratio to each opponent."""
    measured = [row for row in result["rows"] if "side" in row]
    others = [name for name in OPPONENTS if any(row["other"] == name for row in measured)]
    lines = [
        f"{'bytes':>10s}  {'all-reduce':25s}{'time us':>10s}{'algbw GB/s':>12s}{'busbw GB/s':>12s}"
        + "".join(f"{'/ ' + name:>17s}" for name in others)
    ]
    for size, side in product(*(dict.fromkeys(row[key] for row in measured) for key in ("bytes", "side"))):
        group = {row["other"]: row for row in measured if (row["bytes"], row["side"]) == (size, side)}
        lines.append(_line(group, others))
    # What we aim for.
    held = [row for row in measured if "target" in row]
    lines += [f"{row['name']}: {ratio_and_goal(row)}" for row in held]

    lines += _cost_of_choosing([row for row in measured if row["side"] == "auto"])
    lines.append("* the best of ours; all are float32 sums in place, checks and record off")
    if "mpi4py" in others:
        lines.append("mpi4py: recursive doubling as a loop of Sendrecv and numpy.add, the floor for short messages")
    return "\n".join(lines)


def _cost_of_choosing(auto: list[dict[str, Any]]) -> list[str]:
    """Return the line that says what a wrong choice of "auto" costs, and the remedy where that is more than a tenth."""
    if not auto:
        return []
    worst = max(auto, key=lambda row: row["to_best"])
    choice = max(auto, key=lambda row: row["choice_to_best"])
    lines = [
        f"auto / best of ours: at most {worst['to_best']:.2f}, at {worst['bytes']:,} B; the algorithms that it"
        f" chose, called by name: at most {choice['choice_to_best']:.2f}, at {choice['bytes']:,} B"
    ]
    if choice["choice_to_best"] > TOLERANCE:
        lines.append(
            "auto chose a slower algorithm; unless MINIDIST_TUNING=off, the algorithms have been measured anew"
        )
    return lines


def simulated_rows() -> list[dict[str, Any]]:
    """Return the messages per CPU second of the simulated world; minima of three runs, of the training step one."""

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

    def step(comm: Comm) -> None:
        model = DistributedDataParallel(MLP([16, 32, 4]), comm, algorithm="ring")
        cross_entropy(model(Tensor(np.ones((4, 16), np.float32))), np.arange(4)).backward()

    # (name, ranks, messages of one run, runs, program); a barrier sends ceil(log2 10,000) = 14 messages per rank.
    result = []
    for name, ranks, messages, runs, program in (
        ("simulated: send and receive", 2, 20_000, 3, ping),
        ("simulated: 20 shifts", 4096, 20 * 4096, 3, shifts),
        ("simulated: barrier", 10_000, 14 * 10_000, 3, lambda comm: comm.barrier()),
        ("simulated: training step, ring", 1024, 2 * 1023 * 1024, 1, step),
    ):
        seconds = []
        for _ in range(runs):
            began = time.process_time()
            SimWorld(ranks, checks=False, record=False).run(program)  # as in every benchmark
            seconds.append(time.process_time() - began)
        best = min(seconds)
        result.append(
            {
                "name": f"{name}, {ranks} ranks",
                "ratio": None,
                "median_s": best,
                "rounds": runs,
                "messages_per_s": messages / best,
            }
        )
    return result


def main(rounds: int, sizes: list[int], own: Sequence[str] = ()) -> None:
    """Run one rank of the benchmark."""
    for source in own:
        load_algorithm(source, "all_reduce")
    with_torch = has_torch()
    with mpi_world(with_torch=with_torch) as world:
        sides = sides_of(world, with_torch)
        result = []
        for size in sizes:
            times = measure(world, sides, size, rounds)
            result += rows(times, size, world.size, rounds, choose(world.comm, "all_reduce", size))
        # All ranks have the same times, those of the slowest rank, and so measure together.
        if any(row.get("choice_to_best", 0) > TOLERANCE for row in result):
            measured_times(world.comm, world, "all_reduce", anew=True)
        library = world.MPI.Get_library_version().splitlines()[0].strip("\0 ")
        report(world, {**environment(with_torch), "mpi": library}, result)
