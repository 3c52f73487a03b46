"""mp.spawn, uneven inputs under Join, and an optimizer whose states are sharded."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def work(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29617"
    on_cpu = "--cpu" in sys.argv
    dist.init_process_group("gloo" if on_cpu else "nccl", rank=rank, world_size=size)
    device = "cpu" if on_cpu else rank
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3).to(device), device_ids=None if on_cpu else [rank])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with Join([model, optimizer]):
        for _ in range(3 + rank):
            loss = model(torch.randn(5, 4, generator=generator).to(device)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    print("rank", rank, "loss", loss.item(), "weight", model.module.weight.double().sum().item())
    if rank == 0:
        print("rank 0 states", len(optimizer.state_dict()["state"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = 2 if "--cpu" in sys.argv else min(2, torch.cuda.device_count())
    mp.spawn(work, args=(ranks,), nprocs=ranks)
    print("done")
