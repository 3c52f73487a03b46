"""A tensor-parallel step of GPT blocks compared with PyTorch's `parallelize_module` on gloo, in the same processes.

    minidist bench step --tp 2 --against torch

Each rank holds the same blocks twice: ours, and PyTorch's cut by ColwiseParallel and RowwiseParallel. PyTorch's fused
Q|K|V has its rows in the order in which a contiguous cut gives each rank whole heads.

Proved by: tests/parallel/test_tensor_against_torch.py, tests/bench/test_step.py
"""

from functools import partial
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.comm.mpi.world import MPIWorld
from minidist.core.autograd import Tensor
from minidist.core.comm import Comm
from minidist.core.nn import Block, FlatParameters, GPTConfig, Sequential
from minidist.core.optim import AdamW
from minidist.core.parallel.model_parallel import gpt_plan, parallelize_module
from minidist.report.bench.harness import (
    Step,
    best_and_median,
    check_opponent,
    report_with_torch,
    row_of,
    run_ranks,
    time_on_ranks,
    training_step,
)
from minidist.report.bench.workloads import ADAMW

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 8, 4, 8, 128
TARGET = 0.65
# Our name of a layer in a block -> PyTorch's.
NAMES = {
    "ln_1": "ln_1",
    "ln_2": "ln_2",
    "attn.c_attn": "qkv",
    "attn.c_proj": "proj",
    "mlp.c_fc": "fc",
    "mlp.c_proj": "out",
}
# The styles of `gpt_plan` for one block, by names inside the block.
PLAN = {name.removeprefix("transformer.h.*."): style for name, style in gpt_plan(2).items() if "h.*." in name}


def bench_tensor_parallel(ranks: int = 2, rounds: int = 8, against: str | None = "torch") -> dict[str, Any]:
    """Return {environment, rows} of one row: our step against PyTorch's (None without torch, or against=None).

    Starts `mpiexec -n ranks` itself. Errors: UsageError when the heads do not divide over the ranks.
    """
    if ranks < 2 or HEADS % ranks:
        choices = ", ".join(str(n) for n in range(2, HEADS + 1) if HEADS % n == 0)
        raise UsageError(f"bench step --tp {ranks}: the blocks have {HEADS} heads; take one of {choices}")
    check_opponent(against)
    return run_ranks(main, ranks, rounds, against)


def whole_blocks(dtype: Any) -> Sequential:
    """Return LAYERS blocks of a GPT, on one device."""
    blocks = Sequential(*[Block(GPTConfig(n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS), dtype) for _ in range(LAYERS)])
    return blocks.initialize(1)


def our_blocks(comm: Comm, dtype: Any) -> Any:
    """Return the blocks, cut over `comm`."""
    return parallelize_module(whole_blocks(dtype), comm, {f"layers.*.{name}": style for name, style in PLAN.items()})


def their_blocks(ranks: int, dtype: Any) -> tuple[Any, dict[str, str]]:
    """Return PyTorch's blocks with the same weights, cut over the process group, and {our name: theirs}."""
    import torch
    import torch.nn.functional as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    heads, kind = HEADS // ranks, getattr(torch, np.dtype(dtype).name)

    class TorchBlock(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = (torch.nn.LayerNorm(WIDTH, dtype=kind) for _ in range(2))
            sizes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
            self.qkv, self.proj, self.fc, self.out = (torch.nn.Linear(n, m, dtype=kind) for n, m in sizes)

        def forward(self, x: Any) -> Any:
            q, k, v = (
                part.reshape(BATCH, LENGTH, heads, WIDTH // HEADS).transpose(1, 2)
                for part in self.qkv(self.ln_1(x)).chunk(3, -1)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.proj(mixed.reshape(BATCH, LENGTH, -1))
            return x + self.out(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    # [1] PyTorch's blocks get our weights, in its own order.
    whole = whole_blocks(dtype)
    theirs, names = torch.nn.Sequential(*[TorchBlock() for _ in range(LAYERS)]), {}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            _, layer, *path, part = name.split(".")
            names[name] = f"{layer}.{NAMES['.'.join(path)]}.{part}"
            theirs.get_parameter(names[name]).copy_(as_torch(name, parameter.data, ranks))

    # [2] They are cut by columns and then by rows, in attention and in the MLP: two all-reduces per block.
    mesh = init_device_mesh("cpu", (ranks,))
    for block in theirs:
        plan = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "fc": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return theirs, names


def as_torch(name: str, array: np.ndarray, ranks: int) -> Any:
    """Return one of our parameters (or gradients), whole, as PyTorch has it."""
    import torch

    if "c_attn" in name:
        # The last dimension of the fused Q|K|V, from q k v to q0 k0 v0 q1 k1 v1.
        split = array.reshape(*array.shape[:-1], 3, ranks, WIDTH // ranks)
        array = np.swapaxes(split, -3, -2).reshape(array.shape)
    return torch.tensor(np.ascontiguousarray(array.T))


def our_step(comm: Comm, x: np.ndarray) -> Step:
    """Return a step of AdamW on the mean square of the blocks' output."""
    blocks = our_blocks(comm, np.float32)
    flat = FlatParameters(blocks.parameters())
    return training_step([flat], lambda: _mean_square(blocks(Tensor(x)), x.size), AdamW(flat, **ADAMW))


def _mean_square(y: Any, elements: int) -> Any:
    return (y * y).sum() * (1 / elements)


def torch_step(ranks: int, x: np.ndarray) -> Step:
    """Return PyTorch's step: one fused AdamW for the cut parameters, one for the others (it does not mix them)."""
    import torch

    blocks, _ = their_blocks(ranks, np.float32)
    torch_x = torch.tensor(x)
    groups = [[p for p in blocks.parameters() if hasattr(p, "full_tensor") == cut] for cut in (True, False)]
    optimizers = [torch.optim.AdamW(group, fused=True, **ADAMW) for group in groups]
    return training_step([blocks], lambda: _mean_square(blocks(torch_x), x.size), *optimizers)


def compare(rounds: int, world: MPIWorld, with_torch: bool) -> list[dict[str, Any]]:
    """Return the row. The losses of both sides must agree."""
    comm = world.comm
    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    sides = {"own": our_step(comm, x)} | ({"torch": torch_step(comm.size, x)} if with_torch else {})

    # Sums over ranks round differently on both sides, hence the larger tolerance.
    times = time_on_ranks(world, sides, rounds, tolerance=1e-3)
    name = f"tp, {comm.size} ranks, {LAYERS} blocks, against torch parallelize_module on gloo"
    return [{**row_of(name, times, "own", "torch", rounds, TARGET), **best_and_median(times)}]


def main(rounds: int, against: str | None) -> None:
    """Run one rank of the benchmark."""
    report_with_torch(partial(compare, rounds), against is not None)
