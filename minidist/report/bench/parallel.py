"""How fast is a step of data parallelism, and of each ZeRO stage, compared with PyTorch's counterpart on gloo?

    ours      DistributedDataParallel     ZeroOptimizer(stage=1)      ZeroOptimizer(stage=2)     fully_shard
    PyTorch   DistributedDataParallel     ZeroRedundancyOptimizer     -                          fully_shard (FSDP2)

Each rank of an `mpiexec` holds the same GPT once for each side and trains on its own rows.

Proved by: tests/parallel/test_fully_shard_against_torch.py
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted
from minidist.comm.mpi.world import MPIWorld
from minidist.core.comm import Comm
from minidist.core.nn import FlatParameters
from minidist.core.optim import AdamW
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
from minidist.parallel import gather_tensors
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.zero import ZeroOptimizer
from minidist.report.bench.environment import environment, has_torch
from minidist.report.bench.harness import Step, interleave_ranks, mpi_world, report, row_of, run_ranks, warm_up
from minidist.report.bench.workloads import ADAMW, CASES, StepCase, gpt_case, make_batch, make_model

STEPS = 2  # steps per round and side
# (name of a row, our side, the other side, the ratio that we aim for), for each --zero; None: data parallelism
ROWS: dict[int | None, list[tuple[str, str, str, float | None]]] = {
    None: [
        ("ddp, {n} ranks, against torch DDP on gloo", "ddp", "torch ddp", 1.00),
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
    """Return {environment, rows} of data parallelism, or of the ZeRO stages `zero`, all sides interleaved in one run.

    against: "torch", or None to measure minidist alone; then, and where torch is not installed, its ratios are None.
    Starts `mpiexec -n ranks` itself.
    """
    gpt_case(case, "bench step --ranks")
    if any(stage not in (1, 2, 3) for stage in zero):
        raise UsageError(f"bench step --zero {', '.join(map(str, zero))}; the stages are 1, 2 and 3")
    if against not in ("torch", None):
        raise UsageError(f"bench step --against {quoted(against)}{nearest(str(against), ['torch'])}; it can be torch")
    return run_ranks("minidist.report.bench.parallel", ranks, case, rounds, ",".join(map(str, zero)), against or "")


def own_side(
    name: str, case: StepCase, comm: Comm, dtype: Any = np.float32
) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """Return our step of the side `name`, and a function that gathers its gradients and weights by name."""
    model = make_model(case, dtype)
    # Each rank trains on other rows.
    inputs, targets = make_batch(case, seed=comm.rank)
    forward: Any = model
    tensors: Callable[[], dict[str, Any]]
    if name == "zero 3":
        # Bottom up: each block is a unit, and the model is the unit of the rest.
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
        zero_grad = stepper.zero_grad
        tensors = lambda: gather_tensors([stepper.shard], stepper.optimizer)  # noqa: E731
    else:
        # "ddp", or "alone": the same step without communication.
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
    """Return PyTorch's step of the side `name`, on the default process group, and the module."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from minidist.report.bench.torch_peer import torch_adamw, torch_training, torch_twin

    # The wrappers are those of PyTorch's tutorials: one FSDP unit per block, one DDP around the model.
    module = torch_twin(case, make_model(case, dtype), getattr(torch, np.dtype(dtype).name))
    if name == "torch zero 3":
        mesh = init_device_mesh("cpu", (ranks,))
        for part in [*module.transformer.h, module]:
            torch_fully_shard(part, mesh=mesh)
        optimizer = torch_adamw(module.parameters())
    else:
        module = TorchDDP(module)
        if name == "torch zero 1":
            optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, fused=True, **ADAMW)
        else:
            optimizer = torch_adamw(module.parameters())
    return torch_training(case, module, optimizer, seed=rank), module


def compare(
    world: MPIWorld, case: StepCase, rounds: int, chosen: Sequence[int | None], with_torch: bool
) -> list[dict[str, Any]]:
    """Return the rows. The losses of all sides must agree, except of "alone", which sees the gradients of one rank."""
    comm = world.comm
    wanted = [row for stage in chosen for row in ROWS[stage]]

    # Each side is built once, although several rows compare with it.
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

    warm_up(sides, f"rank {comm.rank}", compared=[name for name in sides if name != "alone"])
    times = interleave_ranks(world, sides, rounds, STEPS)
    return [
        row_of(name.format(n=comm.size), times, ours, theirs, rounds, target) for name, ours, theirs, target in wanted
    ]


def main(case_name: str, rounds: str, zero: str, against: str) -> None:
    """Run one rank of the benchmark."""
    with_torch, case = against == "torch" and has_torch(), CASES[case_name]
    with mpi_world(with_torch=with_torch) as world:
        chosen = [int(stage) for stage in zero.split(",")] if zero else [None]
        report(world, environment(with_torch), compare(world, case, int(rounds), chosen, with_torch))


if __name__ == "__main__":
    main(*sys.argv[1:5])
