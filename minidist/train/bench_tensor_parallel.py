"""A tensor-parallel step of GPT blocks beside PyTorch's `parallelize_module` on gloo, in the same processes.

    mpiexec -n 2 python -m minidist.train.bench_tensor_parallel              step times, float32
    mpiexec -n 2 python -m minidist.train.bench_tensor_parallel --check      gradients, float64: the largest difference

Each rank holds the same blocks twice: ours, and PyTorch's cut by ColwiseParallel and RowwiseParallel, its fused Q|K|V with
rows in the order in which a contiguous cut gives each rank whole heads. A round times one side and then the other; a step
takes as long as its slowest rank. Rank 0 prints one JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from minidist.autograd import Tensor
from minidist.base.process import tune_process
from minidist.comm.mpi import MPIWorld
from minidist.nn import Block, FlatParameters, GPTConfig, Sequential
from minidist.optim import AdamW
from minidist.parallel import tensor as tp

WIDTH, HEADS, LAYERS, BATCH, LENGTH, STEPS, ROUNDS = 256, 8, 4, 8, 128, 2, 8


class TorchBlock(torch.nn.Module):
    """The same block; `heads` are those of this rank."""

    def __init__(self, heads, dtype):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (torch.nn.LayerNorm(WIDTH, dtype=dtype) for _ in range(2))
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype), torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.fc, self.out = torch.nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), torch.nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        q, k, v = (
            part.reshape(BATCH, LENGTH, self.heads, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(mixed.reshape(BATCH, LENGTH, -1))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


NAMES = {
    "ln_1": "ln_1", "ln_2": "ln_2", "attn.c_attn": "qkv", "attn.c_proj": "proj", "mlp.c_fc": "fc", "mlp.c_proj": "out",
}  # fmt: skip
PLAN = {name.removeprefix("transformer.h.*."): style for name, style in tp.gpt_plan(2).items() if "h.*." in name}


def by_rank(array, ranks):
    """The last dim of a fused Q|K|V, from q k v to q0 k0 v0 q1 k1 v1."""
    split = array.reshape(*array.shape[:-1], 3, ranks, WIDTH // ranks)
    return np.ascontiguousarray(np.swapaxes(split, -3, -2)).reshape(array.shape)


def as_torch(name, array, ranks):
    """One of our parameters (or gradients) as PyTorch has it."""
    if "c_attn" in name:
        array = by_rank(array, ranks)
    return torch.tensor(np.ascontiguousarray(array.T))


def build(comm, dtype):
    """(our blocks, PyTorch's blocks with the same weights, {our name: theirs})."""
    ranks, kind = comm.size, getattr(torch, np.dtype(dtype).name)
    blocks = Sequential(*[Block(GPTConfig(n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS), dtype) for _ in range(LAYERS)])
    blocks.initialize(1)
    theirs = torch.nn.Sequential(*[TorchBlock(HEADS // ranks, kind) for _ in range(LAYERS)])
    names = {}
    for name, _ in blocks.named_parameters():
        _, layer, *path, kind_of = name.split(".")
        names[name] = f"{layer}.{NAMES['.'.join(path)]}.{kind_of}"
    with torch.no_grad():
        for name, parameter in blocks.named_parameters():
            theirs.get_parameter(names[name]).copy_(as_torch(name, parameter.data, ranks))
    mesh = init_device_mesh("cpu", (ranks,))
    for block in theirs:
        plan = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "fc": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    tp.parallelize_module(blocks, comm, {f"layers.*.{name}": style for name, style in PLAN.items()})
    return blocks, theirs, names


def whole(parameter):
    """A PyTorch gradient, gathered."""
    grad = parameter.grad
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).numpy()


def check(comm):
    """The largest difference between our gathered gradients and PyTorch's, relative to the largest gradient."""
    ours, theirs, names = build(comm, np.float64)
    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH))
    y = ours(Tensor(x))
    (y * y).sum().backward()
    z = theirs(torch.tensor(x))
    (z * z).sum().backward()
    worst = float(np.abs(y.data - z.detach().numpy()).max())
    largest = 0.0
    for name, parameter in ours.named_parameters():
        mine = tp.full_tensor(parameter.grad, parameter.layout, {"tp": comm})
        largest = max(largest, float(np.abs(mine).max()))
        worst = max(worst, float(np.abs(as_torch(name, mine, comm.size).numpy() - whole(theirs.get_parameter(names[name]))).max()))
    return {"largest_difference": worst, "largest_gradient": largest, "parameters": len(names)}


def measure(world):
    """Seconds of a step of both sides, and the median of the rounds' ratios."""
    comm = world.comm
    ours, theirs, _ = build(comm, np.float32)
    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    torch_x, scale = torch.tensor(x), 1 / x.size
    flat = FlatParameters(ours.parameters())
    optimizer = AdamW(flat, lr=1e-3, weight_decay=0.01)
    groups = [[p for p in theirs.parameters() if hasattr(p, "full_tensor") == cut] for cut in (True, False)]  # not mixed
    torch_optimizers = [torch.optim.AdamW(group, lr=1e-3, weight_decay=0.01, fused=True) for group in groups]

    def our_step():
        flat.zero_grad()
        y = ours(Tensor(x))
        loss = (y * y).sum() * scale
        loss.backward()
        optimizer.step()
        return loss.item()

    def torch_step():
        theirs.zero_grad(set_to_none=True)
        y = theirs(torch_x)
        loss = (y * y).sum() * scale
        loss.backward()
        for each in torch_optimizers:
            each.step()
        return loss.item()

    for _ in range(3):
        mine, other = our_step(), torch_step()
        assert abs(mine - other) < 1e-3 * abs(other), (mine, other)
    times = {our_step: [], torch_step: []}
    for number in range(ROUNDS):
        for side in (our_step, torch_step) if number % 2 == 0 else (torch_step, our_step):
            world.base.Barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                side()
            times[side].append(world.base.allreduce((time.perf_counter() - start) / STEPS, op=world.MPI.MAX))
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    return {
        "ratio": statistics.median(ratios), "ratio_of_minima": min(times[our_step]) / min(times[torch_step]), "median_s": statistics.median(times[our_step]),
        "torch_median_s": statistics.median(times[torch_step]), "rounds": ROUNDS, "ranks": comm.size,
    }  # fmt: skip


def main():
    tune_process()
    torch.set_num_threads(1)
    world = MPIWorld(checks=False, timeout=300, record=False)
    folder = world.base.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=world.rank, world_size=world.comm.size
    )
    answer = check(world.comm) if "--check" in sys.argv else measure(world)
    if world.rank == 0:
        print(json.dumps(answer))
    dist.destroy_process_group()
    world.finish()


if __name__ == "__main__":
    main()
