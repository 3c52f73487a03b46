"""What all benchmarks share: sides measured in turn, ratios round by round, and ranks under mpiexec.

A machine's speed drifts, so two sides are never timed one after the other:

    round 0    ours, theirs        a ratio per round, ours over theirs; its median over rounds is reported
    round 1    theirs, ours        (below 1 we are faster)

A fast wrong step is worth nothing, so `warm_up` compares the losses of all sides before anything is timed. Checks
(headers) and the record are off in every benchmark.

Proved by: tests/bench/test_harness.py, tests/bench/test_step.py, tests/bench/test_collectives.py
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidist.base.errors import MinidistError, UsageError, nearest, quoted
from minidist.base.process import tune_process
from minidist.base.read_file import parse_json
from minidist.comm.launched import has_launcher, launched_rank
from minidist.comm.launcher import run_under_mpiexec
from minidist.comm.mpi.world import MPIWorld
from minidist.report.bench.environment import environment, has_torch

Step = Callable[[], float]  # one training step; returns the loss
Times = dict[str, list[float]]  # seconds of each side in each round
STEPS = 2  # of training, per round and side, where the sides run on ranks


def interleave(sides: Sequence[str], rounds: int, seconds: Callable[[str], float]) -> Times:
    """Measure every side once per round; every other round goes backwards, so that no side always follows another."""
    times: Times = {name: [] for name in sides}
    # Odd rounds run backwards, as in the picture.
    for number in range(rounds):
        for name in sides if number % 2 == 0 else sides[::-1]:
            times[name].append(seconds(name))
    return times


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    """Return the mean time of `calls` calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def median_ratio(ours: Sequence[float], theirs: Sequence[float] | None) -> float | None:
    """Return the median over rounds of ours / theirs; None when there is no other side."""
    return None if theirs is None else statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def row_of(name: str, times: Times, ours: str, theirs: str, rounds: int, target: float | None = None) -> dict[str, Any]:
    """Return the row of a side next to another one, which may not be there; target: the goal of the ratio."""
    goal = {} if target is None else {"target": target}
    ratio = median_ratio(times[ours], times.get(theirs))
    return {"name": name, "ratio": ratio, "median_s": statistics.median(times[ours]), "rounds": rounds, **goal}


def best_and_median(times: Times) -> dict[str, float | None]:
    """Return what else a row of "own" next to "torch" has: the ratio of their fastest rounds, and PyTorch's median."""
    own, other = times["own"], times.get("torch")
    if other is None:
        return {"best_ratio": None, "torch_median_s": None}
    return {"best_ratio": min(own) / min(other), "torch_median_s": statistics.median(other)}


def ratio_and_goal(row: Mapping[str, Any]) -> str:
    """Format the ratio of a row, the goal that it is held to if it has one, and whether it is met."""
    ratio, goal = row.get("ratio"), row.get("target")
    text = "ratio     -" if ratio is None else f"ratio {ratio:5.2f}"
    if goal is None:
        return text
    verdict = "" if ratio is None else ", met" if ratio <= goal else ", not met"
    return f"{text} (goal {goal:.2f}{verdict})"


def training_step(held: Sequence[Any], loss_of: Callable[[], Any], *optimizers: Any) -> Step:
    """Return a step of ours or of PyTorch's: no gradients in `held`, a loss, its backward pass, and the updates."""

    def step() -> float:
        for parameters in held:
            parameters.zero_grad()
        loss = loss_of()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.item())  # waits for the device

    return step


def warm_up(
    sides: Mapping[str, Step], where: str, compared: Sequence[str] | None = None, tolerance: float = 2e-4
) -> list[tuple[float, ...]]:
    """Run three steps of every side and return their losses; the first side's must agree with those of `compared`.

    compared: default all sides. Raises MinidistError, so that no ratio is reported for a wrong step.
    """
    if not launched_rank():
        print(f"{where}: {' and '.join(sides)} in turn; this may take minutes", file=sys.stderr, flush=True)
    losses = []
    for number in range(3):
        found = {name: step() for name, step in sides.items()}
        losses.append(tuple(found.values()))
        first, mine = next(iter(found.items()))
        for name in found if compared is None else compared:
            # `not ... <=` refuses NaN, too.
            if not abs(mine - found[name]) <= tolerance * max(1.0, abs(found[name])):
                raise MinidistError(
                    f"{where}: the loss of step {number} is {mine} ({first}) and {found[name]} ({name}); no ratio is"
                    " given"
                )
    return losses


def known_cases(names: Sequence[str], cases: Mapping[str, Any], bench: str) -> None:
    """Raise UsageError for a name that is not one of the cases."""
    for name in names:
        if name not in cases:
            raise UsageError(f"{bench}: no case {quoted(name)}{nearest(name, cases)}; one of {', '.join(cases)}")


def check_opponent(against: str | None) -> None:
    """Raise UsageError for a side of a step that is neither "torch" nor None, which measures minidist alone."""
    if against not in ("torch", None):
        raise UsageError(f"bench step --against {quoted(against)}{nearest(str(against), ['torch'])}; it can be torch")


# --- ranks under mpiexec ----------------------------------------------------------------------------------------------


def run_ranks(main: Callable[..., None], ranks: int, *arguments: Any) -> dict[str, Any]:
    """Call main(*arguments) on ranks of an mpiexec; returns the JSON object that rank 0 prints.

    Raises UsageError in a process of another mpiexec, each of which would start all ranks.
    """
    if has_launcher():
        raise UsageError(
            f"this benchmark starts its {ranks} ranks itself; run it without mpiexec (--ranks says how many)"
        )
    answer = run_under_mpiexec(ranks, call_of(main, *arguments))
    return parse_json(answer.stdout, any_float=True)  # type: ignore[no-any-return]


def call_of(main: Callable[..., None], *arguments: Any) -> list[str]:
    """Return the words after `python` that call a function of a module; the arguments are written as JSON."""
    return ["-m", "minidist.report.bench.harness", main.__module__, main.__name__, json.dumps(arguments)]


@contextmanager
def mpi_world(kind: type[MPIWorld] = MPIWorld, *, with_torch: bool = False, **settings: Any) -> Iterator[Any]:
    """Yield the world with this process as one of its ranks; nothing is checked and nothing is recorded.

    with_torch: the ranks are a process group of PyTorch's gloo too.
    """
    # Speed depends on the allocator and on the number of threads.
    tune_process()
    world = kind(**{"checks": False, "timeout": 300, "record": False, **settings})
    if with_torch:
        join_gloo(world)
    yield world
    if with_torch:
        import torch.distributed as dist

        dist.destroy_process_group()
    world.finish()
    world.close()


def join_gloo(world: MPIWorld) -> None:
    """Make the ranks of `world` PyTorch's default process group, on gloo and one thread per rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    # Rank 0 makes a folder, and the ranks find each other by a file in it.
    folder = world.base.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    rendezvous = f"file://{Path(folder) / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=world.rank, world_size=world.size)


def report(world: MPIWorld, environment: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the result of a benchmark on rank 0, for `run_ranks`."""
    if world.rank == 0:
        print(json.dumps({"environment": environment, "rows": rows}))


def report_with_torch(
    compare: Callable[[MPIWorld, bool], list[dict[str, Any]]], is_wanted: bool, kind: type[MPIWorld] = MPIWorld
) -> None:
    """Run one rank of a benchmark and print its rows. is_wanted: PyTorch, which is there if it is installed.

    compare(world, with_torch): returns the rows.
    """
    with_torch = is_wanted and has_torch()
    with mpi_world(kind, with_torch=with_torch) as world:
        report(world, environment(with_torch), compare(world, with_torch))


def time_on_ranks(
    world: MPIWorld, sides: Mapping[str, Step], rounds: int, compared: Sequence[str] | None = None, **bound: float
) -> Times:
    """Return the seconds of STEPS steps of each side in each round, once `warm_up` has compared the losses."""
    warm_up(sides, f"rank {world.rank}", compared, **bound)
    return interleave_ranks(world, sides, rounds, STEPS)


def interleave_ranks(
    world: MPIWorld, sides: Mapping[str, Callable[[], object]], rounds: int, calls: Mapping[str, int] | int
) -> Times:
    """Call `interleave` on all ranks at once: a side begins after a barrier and takes as long as its slowest rank.

    calls: of a side in one round, after one that is not timed.
    """

    def seconds(name: str) -> float:
        # One call that is not timed, so that memory and connections are there.
        sides[name]()
        world.base.Barrier()
        return slowest(world, seconds_per_call(sides[name], calls if isinstance(calls, int) else calls[name]))

    return interleave(list(sides), rounds, seconds)


def slowest(world: MPIWorld, seconds: float) -> float:
    """Return the largest number of all ranks."""
    return world.base.allreduce(seconds, op=world.MPI.MAX)  # type: ignore[no-any-return]


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*parse_json(sys.argv[3], any_float=True))
