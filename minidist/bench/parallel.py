"""How fast is a step of data parallelism, and of each ZeRO stage, beside PyTorch's counterpart on gloo, in the same
processes?

    ours      DistributedDataParallel     ZeroOptimizer(stage=1)      ZeroOptimizer(stage=2)     fully_shard
    PyTorch   DistributedDataParallel     ZeroRedundancyOptimizer     -                          fully_shard (FSDP2)

Each rank of an `mpiexec` holds the same GPT once for each side and trains on its own rows. A round times, after a
barrier each, one side after the other; a step takes as long as its slowest rank. Losses are compared before a ratio is
printed. Checks (headers) are off, as they are in every benchmark.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import MinidistError, UsageError, nearest
from minidist.base.process import tune_process
from minidist.bench.step import (
    CASES,
    Step,
    StepCase,
    environment,
    make_batch,
    make_model,
    torch_adamw,
    torch_training,
    torch_twin,
)
from minidist.comm import Comm
from minidist.comm.launcher import run_under_mpiexec
from minidist.comm.mpi.world import MPIWorld
from minidist.nn import FlatParameters
from minidist.optim import AdamW
from minidist.parallel import (
    DistributedDataParallel,
    ZeroOptimizer,
    fully_shard,
    gather_tensors,
    sharded_parameters,
    shards_of,
)

STEPS = 2  # steps a round and side
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
# (name of a row, our side, the other side, the ratio that we aim for), for each --zero; None: data parallelism
ROWS: dict[int | None, list[tuple[str, str, str, float | None]]] = {
    None: [
        ("ddp, {n} ranks, against torch DDP on gloo", "ddp", "torch ddp", 0.95),
        ("ddp, {n} ranks, against the step without communication", "ddp", "alone", None),
    ],
    1: [
        ("zero 1, {n} ranks, against torch ZeroRedundancyOptimizer on gloo", "zero 1", "torch zero 1", 0.90),
        ("zero 1, {n} ranks, against our ddp", "zero 1", "ddp", 1.10),
    ],
    2: [("zero 2, {n} ranks, against our ddp", "zero 2", "ddp", 1.10)],
    3: [
        ("fully_shard, {n} ranks, against torch FSDP2 on gloo", "zero 3", "torch zero 3", 0.80),
        ("fully_shard, {n} ranks, against our ddp", "zero 3", "ddp", 1.25),
    ],
}


def bench_data_parallel(
    ranks: int = 2, rounds: int = 8, case: str = "gpt", zero: Sequence[int] = (), against: str | None = "torch"
) -> dict[str, Any]:
    """{environment, rows} of data parallelism, or of the ZeRO stages `zero`, all sides interleaved in one run.

    against: "torch", or None for our sides alone (and so it is where torch is not installed: those ratios are None).
    Starts `mpiexec -n ranks` itself.
    """
    if case not in CASES or CASES[case].config is None:
        raise UsageError(
            f"bench step --ranks: no GPT case {case!r}; one of {', '.join(n for n, c in CASES.items() if c.config)}"
        )
    if any(stage not in (1, 2, 3) for stage in zero):
        raise UsageError(f"bench step --zero {', '.join(map(str, zero))}; the stages are 1, 2 and 3")
    if against not in ("torch", None):
        raise UsageError(f"bench step --against {against!r}{nearest(str(against), ['torch'])}; it can be torch")
    arguments = [case, str(rounds), ",".join(map(str, zero)), against or ""]
    answer = run_under_mpiexec(ranks, ["-m", "minidist.bench.parallel", *arguments])
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


def own_side(
    name: str, case: StepCase, comm: Comm, dtype: Any = np.float32
) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """Our step of the side `name`, and what gathers its gradients and weights by name."""
    model = make_model(case, dtype)
    inputs, targets = make_batch(case, seed=comm.rank)
    forward: Any = model
    tensors: Callable[[], dict[str, Any]]
    if name == "zero 3":
        for module in [*model.transformer.h, model]:  # type: ignore[attr-defined]
            fully_shard(module, mesh=comm)
        shards, optimizer = shards_of(model), AdamW(sharded_parameters(model), **ADAMW)

        def zero_grad() -> None:
            for shard in shards:
                shard.zero_grad()

        tensors = lambda: gather_tensors(shards, optimizer)  # noqa: E731
        stepper: Any = optimizer
    elif name in ("zero 1", "zero 2"):
        stepper = ZeroOptimizer(model, AdamW, comm=comm, stage=int(name[-1]), **ADAMW)
        zero_grad, tensors = stepper.zero_grad, stepper.tensors
    else:
        flat = FlatParameters(model.parameters())
        if name == "ddp":
            forward = DistributedDataParallel(model, comm, flat=flat)
        stepper, zero_grad = AdamW(flat, **ADAMW), flat.zero_grad
        tensors = lambda: {  # noqa: E731
            "gradients": {p.name: p.grad for p in flat.parameters},
            "weights": {p.name: p.data for p in flat.parameters},
        }

    def step() -> float:
        zero_grad()
        loss = forward(inputs, targets)
        loss.backward()
        stepper.step()
        return float(loss.item())

    return step, tensors


def torch_side(name: str, case: StepCase, rank: int, ranks: int, dtype: Any = np.float32) -> tuple[Step, Any]:
    """PyTorch's step of the side `name`, on the process group that is there, and the module."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    module = torch_twin(case, make_model(case, dtype), getattr(torch, np.dtype(dtype).name))
    if name == "torch zero 3":
        mesh = init_device_mesh("cpu", (ranks,))
        for part in [*module.transformer.h, module]:
            torch_fully_shard(part, mesh=mesh)
        optimizer = torch_adamw(module.parameters())
    else:
        module = TorchDDP(module)
        if name == "torch zero 1":
            # type: ignore[no-untyped-call]
            optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, fused=True, **ADAMW)
        else:
            optimizer = torch_adamw(module.parameters())
    return torch_training(case, module, optimizer, seed=rank), module


def join_torch(world: MPIWorld) -> bool:
    """Make these ranks a gloo process group; False where torch is not installed."""
    try:
        import torch.distributed as dist
    except ImportError:
        return False
    folder = world.base.bcast(tempfile.mkdtemp() if world.comm.rank == 0 else None)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=world.comm.rank, world_size=world.comm.size
    )
    return True


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


def compare(
    world: MPIWorld, case: StepCase, rounds: int, chosen: Sequence[int | None], with_torch: bool
) -> list[dict[str, Any]]:
    """The rows. Losses of the first steps must be the same on all sides but "alone", which sees other gradients."""
    comm = world.comm
    wanted = [row for stage in chosen for row in ROWS[stage]]
    names = list(dict.fromkeys(name for _, ours, theirs, _ in wanted for name in (ours, theirs)))
    sides = {
        name: (
            torch_side(name, case, comm.rank, comm.size)[0]
            if name.startswith("torch")
            else own_side(name, case, comm)[0]
        )
        for name in names
        if with_torch or not name.startswith("torch")
    }
    for step in range(3):  # warms up, too
        losses = {name: side() for name, side in sides.items()}
        first = losses[wanted[0][1]]
        for name, loss in losses.items():
            if name != "alone" and not abs(first - loss) <= 2e-4 * max(1.0, abs(loss)):
                raise MinidistError(
                    f"rank {comm.rank}: step {step} of {wanted[0][1]} has loss {first}, of {name} {loss}; no ratio is"
                    " given"
                )
    times = measure(world, sides, rounds)

    def ratio(ours: str, theirs: str) -> float | None:
        if theirs not in times:
            return None
        return statistics.median(x / y for x, y in zip(times[ours], times[theirs], strict=True))

    return [
        {
            "name": name.format(n=comm.size),
            "ratio": ratio(ours, theirs),
            "median_s": float(np.median(times[ours])),
            "rounds": rounds,
            **({} if target is None else {"target": target}),
        }
        for name, ours, theirs, target in wanted
    ]


def check(world: MPIWorld, case: StepCase, steps: int = 5) -> dict[str, Any]:
    """fully_shard beside FSDP2 in float64: the largest difference of a gradient and of a weight over `steps` steps of
    AdamW.
    """
    comm = world.comm
    ours, tensors = own_side("zero 3", case, comm, np.float64)
    theirs, module = torch_side("torch zero 3", case, comm.rank, comm.size, np.float64)
    largest = {"gradients": 0.0, "weights": 0.0, "losses": 0.0}
    for _ in range(steps):
        largest["losses"] = max(largest["losses"], abs(ours() - theirs()))
        mine = tensors()
        for name, parameter in module.named_parameters():
            pairs = {"weights": parameter.detach(), "gradients": parameter.grad}
            for kind, tensor in pairs.items():
                whole = tensor.full_tensor().numpy()
                largest[kind] = max(largest[kind], float(np.abs(mine[kind][name] - whole).max()))
    entry = max(float(np.abs(gradient).max()) for gradient in mine["gradients"].values())
    return {
        "largest_difference": largest,
        "largest_gradient": entry,
        "parameters": len(mine["weights"]),
        "steps": steps,
    }


def main(case_name: str, rounds: str, zero: str, against: str) -> None:
    """One rank of the benchmark, or, with `rounds` "check", of the comparison in float64; rank 0 prints the result as
    JSON.
    """
    tune_process()
    world = MPIWorld(checks=False, timeout=300, record=False)
    with_torch = against == "torch" and join_torch(world)
    if rounds == "check":
        answer = check(world, CASES[case_name])
    else:
        chosen = [int(stage) for stage in zero.split(",")] if zero else [None]
        rows = compare(world, CASES[case_name], int(rounds), chosen, with_torch)
        answer = {"environment": environment(with_torch), "rows": rows}
    if world.comm.rank == 0:
        print(json.dumps(answer))
    if with_torch:
        import torch.distributed as dist

        dist.destroy_process_group()
    world.finish()
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:5])
