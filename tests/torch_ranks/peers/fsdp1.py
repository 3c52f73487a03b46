"""FullyShardedDataParallel, its full state dict and that of its optimizer."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

rank = int(os.environ["RANK"])
device = torch.device("cpu") if "--cpu" in sys.argv else torch.device(f"cuda:{rank}")
dist.init_process_group("gloo" if "--cpu" in sys.argv else "cpu:gloo,cuda:nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), FSDP(nn.Linear(16, 16), device_id=device), nn.Linear(16, 4))
model = FSDP(model, device_id=device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for step in range(3):
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("rank", rank, "step", step, "loss", loss.item(), "norm", norm.item())
weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
for name, value in weights.items():
    print("rank", rank, name, value.double().sum().item(), moments["state"][name]["exp_avg"].double().sum().item())
dist.destroy_process_group()
