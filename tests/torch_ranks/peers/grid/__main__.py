"""A package with a module-wide grid, run by name: column-parallel and row-parallel layers, and averaged gradients."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import groups


@dataclass
class Settings:
    width: int = 8
    lr: float = 0.1


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient, group=groups.grid.tp_group)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=groups.grid.tp_group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


settings = Settings()
device = torch.device("cpu") if "--cpu" in sys.argv else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if "--cpu" in sys.argv else "nccl")
groups.make(2, 2)
grid = groups.grid
torch.manual_seed(0)
first, second = torch.randn(settings.width, 4), torch.randn(3, settings.width)
first = first.chunk(2, 0)[grid.tp_rank].to(device).requires_grad_()
second = second.chunk(2, 1)[grid.tp_rank].to(device).requires_grad_()
torch.manual_seed(100 + grid.dp_rank)
for step in range(3):
    x = torch.randn(5, 4, device=device)
    loss = Reduce.apply(torch.tanh(Copy.apply(x) @ first.T) @ second.T).square().mean()
    loss.backward()
    for weight in (first, second):
        dist.all_reduce(weight.grad, group=groups.grid.dp_group)
        weight.data -= settings.lr * weight.grad / 2
        weight.grad = None
    print("rank", dist.get_rank(), "tp", grid.tp_rank, "dp", grid.dp_rank, "step", step, "loss", loss.item())
os.environ["PLACE"] = f"{grid.tp_rank}-{grid.dp_rank}"
dist.barrier()
print("rank", dist.get_rank(), os.environ["PLACE"], groups.grid is grid, first.double().sum().item())
dist.destroy_process_group()
