"""DistributedDataParallel as under torchrun, which leaves where there are no GPUs for its ranks."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["LOCAL_RANK"])
if "--cpu" in sys.argv:
    device, ids, backend = torch.device("cpu"), None, "gloo"
else:
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        print("not enough GPUs")
        sys.exit()
    torch.cuda.set_device(rank)
    device, ids, backend = torch.device("cuda", rank), [rank], "nccl"
dist.init_process_group(backend)

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).to(device)
model = DistributedDataParallel(model, device_ids=ids)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(data, seed=3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=6, sampler=sampler, pin_memory=ids is not None):
        loss = ((model(x.to(device, non_blocking=True)) - y.to(device)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("rank", rank, "epoch", epoch, "loss", loss.item())
print("rank", rank, "sum", sum(p.double().sum().item() for p in model.parameters()))
dist.destroy_process_group()
