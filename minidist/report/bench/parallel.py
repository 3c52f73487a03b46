"""How fast is a step of data parallelism, and of each ZeRO stage, compared with PyTorch's counterpart on gloo?

    ours      DistributedDataParallel     ZeroOptimizer(stage=1)      ZeroOptimizer(stage=2)     fully_shard
    PyTorch   DistributedDataParallel     ZeroRedundancyOptimizer     -                          fully_shard (FSDP2)

Each rank of an `mpiexec` holds the same GPT once for each side and trains on its own rows.

Proved by: tests/parallel/test_fully_shard_against_torch.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.comm.mpi.world import MPIWorld
from minidist.core.comm import Comm
from minidist.core.nn import FlatParameters, Module
from minidist.core.optim import AdamW
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.zero import ZeroOptimizer
from minidist.report.bench.harness import (
    Step,
    check_opponent,
    report_with_torch,
    row_of,
    run_ranks,
    time_on_ranks,
    training_step,
)
from minidist.report.bench.workloads import ADAMW, CASES, StepCase, gpt_case, make_batch, make_model

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
    check_opponent(against)
    return run_ranks(main, ranks, case, rounds, list(zero), against)


def own_side(name: str, case: StepCase, comm: Comm, dtype: Any = np.float32) -> tuple[Step, Module, Any]:
    """Return our step of the side `name`, its model, and its optimizer."""
    model = make_model(case, dtype)
    # Each rank trains on other rows.
    inputs, targets = make_batch(case, seed=comm.rank)
    forward: Any = model
    optimizer: Any
    held: Sequence[Any]
    if name == "zero 3":
        # Bottom up: each block is a unit, and the model is the unit of the rest.
        for module in [*model.transformer.h, model]:  # type: ignore[attr-defined]
            fully_shard(module, mesh=comm)
        held, optimizer = shards_of(model), AdamW(sharded_parameters(model), **ADAMW)
    elif name in ("zero 1", "zero 2"):
        optimizer = ZeroOptimizer(model, AdamW, comm=comm, stage=int(name[-1]), **ADAMW)
        held = [optimizer]
    else:
        # "ddp", or "alone": the same step without communication.
        flat = FlatParameters(model.parameters())
        if name == "ddp":
            forward = DistributedDataParallel(model, comm, flat=flat)
        held, optimizer = [flat], AdamW(flat, **ADAMW)
    return training_step(held, lambda: forward(inputs, targets), optimizer), model, optimizer


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
    case: StepCase, rounds: int, chosen: Sequence[int | None], world: MPIWorld, with_torch: bool
) -> list[dict[str, Any]]:
    """Return the rows. The losses of all sides must agree, except of "alone", which sees the gradients of one rank."""
    comm = world.comm
    wanted = [row for stage in chosen for row in ROWS[stage]]

    # Each side is built once, although several rows compare with it.
    names = list(dict.fromkeys(name for _, ours, theirs, _ in wanted for name in (ours, theirs)))
    sides: dict[str, Step] = {}
    for name in names:
        if not name.startswith("torch"):
            sides[name] = own_side(name, case, comm)[0]
        elif with_torch:
            sides[name] = torch_side(name, case, comm.rank, comm.size)[0]
    times = time_on_ranks(world, sides, rounds, [name for name in sides if name != "alone"])
    return [
        row_of(name.format(n=comm.size), times, ours, theirs, rounds, target) for name, ours, theirs, target in wanted
    ]


def main(case_name: str, rounds: int, zero: list[int], against: str | None) -> None:
    """Run one rank of the benchmark."""
    report_with_torch(partial(compare, CASES[case_name], rounds, zero or [None]), against is not None)
