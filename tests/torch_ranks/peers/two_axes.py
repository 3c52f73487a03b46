"""Tensor parallelism and FSDP2 on a mesh of two axes, which is named a mesh of GPUs."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

kind = "cpu" if "--cpu" in sys.argv else "cuda"
mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(kind)
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(mesh["dp"].get_local_rank())
for step in range(2):
    loss = model(torch.randn(6, 8, device=kind)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("rank", rank, "step", step, "loss", loss.item())
for name, parameter in model.named_parameters():
    print("rank", rank, name, parameter.full_tensor().double().sum().item())
whole = init_device_mesh(kind, (2, 2), mesh_dim_names=("a", "b"))
flat = whole["a", "b"]._flatten("ab")
print("rank", rank, "flat", flat.get_local_rank(), "along", whole["b"].get_local_rank())
dist.destroy_process_group()
