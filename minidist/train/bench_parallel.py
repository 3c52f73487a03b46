"""How fast is a data-parallel step, beside PyTorch's DistributedDataParallel on gloo, in the same processes?

Each rank of an `mpiexec` holds the same GPT twice, ours and PyTorch's, and trains on its own rows. A round times, after a
barrier each, one side and then the other, and our step without communication; a step takes as long as its slowest rank.
Losses are compared before a ratio is printed. Checks (headers) are off, as they are in every benchmark.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import MinidistError, UsageError
from minidist.base.process import tune_process
from minidist.comm import Comm
from minidist.comm.launcher import run_under_mpiexec
from minidist.comm.mpi import MPIWorld
from minidist.nn import FlatParameters
from minidist.optim import AdamW
from minidist.parallel import DistributedDataParallel
from minidist.train.bench_step import CASES, StepCase, environment, make_batch, make_model, torch_twin

Step = Callable[[], float]
STEPS = 2  # steps a round and side


def bench_data_parallel(ranks: int = 2, rounds: int = 8, case: str = "gpt") -> dict[str, Any]:
    """{environment, rows}: "ddp" against torch DDP (None without torch), "ddp-communication" against the same step alone.

    Starts `mpiexec -n ranks` itself.
    """
    if case not in CASES or CASES[case].config is None:
        raise UsageError(f"bench step --ranks: no GPT case {case!r}; one of {', '.join(n for n, c in CASES.items() if c.config)}")
    answer = run_under_mpiexec(ranks, ["-m", "minidist.train.bench_parallel", case, str(rounds)])
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


def own_steps(case: StepCase, comm: Comm) -> tuple[Step, Step]:
    """Our step with communication, and without."""

    def make(parallel: bool) -> Step:
        model = make_model(case)
        flat = FlatParameters(model.parameters())
        wrapped = DistributedDataParallel(model, comm, flat=flat) if parallel else model
        optimizer = AdamW(flat, lr=1e-3, weight_decay=0.01)
        inputs, targets = make_batch(case, seed=comm.rank)

        def step() -> float:
            flat.zero_grad()
            loss = wrapped(inputs, targets)
            loss.backward()
            optimizer.step()
            return float(loss.item())

        return step

    return make(True), make(False)


def torch_ddp_step(case: StepCase, comm: Comm, rendezvous: str) -> Step | None:
    """PyTorch's step over gloo in this process; None when torch is not installed."""
    try:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as TorchDDP
    except ImportError:
        return None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=comm.rank, world_size=comm.size)
    twin = TorchDDP(torch_twin(case, make_model(case)))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    inputs, targets = (torch.from_numpy(a) for a in make_batch(case, seed=comm.rank))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = twin(inputs)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(world: MPIWorld, sides: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each side in each round: the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            sides[name]()
            world.base.Barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                sides[name]()
            mine = (time.perf_counter() - start) / STEPS
            times[name].append(world.base.allreduce(mine, op=world.MPI.MAX))
    return times


def main(case_name: str, rounds: int) -> None:
    """One rank of the benchmark; rank 0 prints the result as JSON."""
    tune_process()
    world = MPIWorld(checks=False, timeout=300, record=False)
    comm, case = world.comm, CASES[case_name]
    folder = world.base.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    ddp, alone = own_steps(case, comm)
    theirs = torch_ddp_step(case, comm, str(Path(folder) / "rendezvous"))
    for step in range(3):  # warms up, too
        ours = ddp()
        alone()
        if theirs is not None:
            loss = theirs()
            if not abs(ours - loss) <= 2e-4 * max(1.0, abs(loss)):
                raise MinidistError(f"rank {comm.rank}: step {step} has loss {ours}, PyTorch's {loss}; no ratio is given")
    sides = {"ddp": ddp, "alone": alone} | ({} if theirs is None else {"torch": theirs})
    times = measure(world, sides, rounds)
    if comm.rank == 0:
        print(json.dumps({"environment": environment(theirs is not None), "rows": rows(times, comm.size, rounds)}))
    world.finish()
    world.close()


def rows(times: dict[str, list[float]], ranks: int, rounds: int) -> list[dict[str, Any]]:
    """The two ratios, medians over rounds."""

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    shared = {"median_s": float(np.median(times["ddp"])), "rounds": rounds}
    return [
        {"name": f"ddp, {ranks} ranks, against torch DDP on gloo", "ratio": ratio("ddp", "torch") if "torch" in times else None, **shared},
        {"name": f"ddp, {ranks} ranks, against the step without communication", "ratio": ratio("ddp", "alone"), **shared},
    ]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
